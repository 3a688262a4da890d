"""What plugins implement: abstract classes and their promises, nothing else."""

from .rollout import Capabilities, Completion, Request, RolloutEngine
from .sampler import Candidates, Sampler
from .train import TRAIN_COLUMNS, StepResult, TrainEngine
from .weights import (
    Fetched,
    Host,
    Room,
    TensorType,
    WeightReceiver,
    WeightSender,
    WeightTransport,
    WeightUpdate,
)

__all__ = [
    "TRAIN_COLUMNS",
    "Candidates",
    "Capabilities",
    "Completion",
    "Fetched",
    "Host",
    "Request",
    "RolloutEngine",
    "Room",
    "Sampler",
    "StepResult",
    "TensorType",
    "TrainEngine",
    "WeightReceiver",
    "WeightSender",
    "WeightTransport",
    "WeightUpdate",
]
