"""Interfaces for plugins: abstract classes with their contracts, and the values they exchange."""

from .algorithm import NORMALISERS, Advantages, Algorithm, PackedTokens
from .launcher import (
    FATAL_STATUS,
    Launcher,
    OnFailure,
    Placement,
    WorkerExit,
    WorkerHandle,
    WorkerSettings,
    WorkerSpec,
)
from .leased import Consumer, LeasedBatch, LeasedStep, Producer, StepConsumer, StepPart
from .queue import PutRows, QueueOptions, TransferQueue
from .rollout import (
    SAMPLING_MASK,
    Capabilities,
    Completion,
    Completions,
    Request,
    RolloutEngine,
    StopTexts,
    StopWatch,
)
from .sampler import Candidates, Sampler
from .staleness import StalenessPolicy, StepWindow
from .store import HomeCatalog, HomeOffer, HomeUnit, PayloadStore, StorageHome, StoreContext, StoredBlock
from .tracker import TrackedRun, Tracker
from .train import TRAIN_COLUMNS, StepResult, TrainEngine
from .weight_sync import LoadableUpdate, Publication, RollbackResult, WeightPublisher, WeightSubscriber, WeightSync
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
    "FATAL_STATUS", "NORMALISERS", "SAMPLING_MASK", "TRAIN_COLUMNS", "Advantages", "Algorithm", "Candidates",
    "Capabilities", "Completion", "Completions", "Consumer", "Fetched", "FilePlace", "HomeCatalog", "HomeOffer",
    "HomeUnit", "Host", "Launcher", "LeasedBatch", "LeasedStep", "LoadableUpdate", "OnFailure", "PackedTokens",
    "PayloadStore", "Placement", "Producer", "Publication", "PutRows", "QueueOptions", "Request", "RollbackResult", "RolloutEngine",
    "Room", "Sampler", "StalenessPolicy", "StepConsumer", "StepPart", "StepResult", "StepWindow", "StopTexts",
    "StopWatch", "StorageHome", "StoreContext", "StoredBlock", "TensorType", "TrackedRun", "Tracker", "TrainEngine",
    "TransferQueue", "WeightPublisher", "WeightReceiver", "WeightSender", "WeightSubscriber", "WeightSync",
    "WeightTransport", "WeightUpdate", "WorkerExit", "WorkerHandle", "WorkerSettings", "WorkerSpec",
]  # fmt: skip
