"""Interfaces for plugins: abstract classes with their contracts, and the values they exchange."""

from .algorithm import Advantages, Algorithm, PackedTokens
from .launcher import (
    FATAL_STATUS,
    Launcher,
    OnFailure,
    Placement,
    WorkerExit,
    WorkerHandle,
    WorkerSpec,
    check_on_failure,
)
from .queue import DEFAULT_LEASE_S, DEFAULT_TIMEOUT_S, BatchStream, LeasedBatch, PutRows, TransferQueue
from .rollout import Capabilities, Completion, Completions, Request, RolloutEngine
from .sampler import Candidates, Sampler
from .staleness import StalenessPolicy, StepWindow
from .tracker import TrackedRun, Tracker
from .train import TRAIN_COLUMNS, StepResult, TrainEngine
from .weights import (
    Fetched,
    FilePlace,
    Host,
    Room,
    TensorType,
    WeightReceiver,
    WeightSender,
    WeightTransport,
    WeightUpdate,
)

__all__ = [
    "DEFAULT_LEASE_S",
    "DEFAULT_TIMEOUT_S",
    "FATAL_STATUS",
    "TRAIN_COLUMNS",
    "Advantages",
    "Algorithm",
    "BatchStream",
    "Candidates",
    "Capabilities",
    "Completion",
    "Completions",
    "Fetched",
    "FilePlace",
    "Host",
    "Launcher",
    "LeasedBatch",
    "OnFailure",
    "PackedTokens",
    "Placement",
    "PutRows",
    "Request",
    "RolloutEngine",
    "Room",
    "Sampler",
    "StalenessPolicy",
    "StepResult",
    "StepWindow",
    "TensorType",
    "TrackedRun",
    "Tracker",
    "TrainEngine",
    "TransferQueue",
    "WeightReceiver",
    "WeightSender",
    "WeightTransport",
    "WeightUpdate",
    "WorkerExit",
    "WorkerHandle",
    "WorkerSpec",
    "check_on_failure",
]
