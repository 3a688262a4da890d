"""AsyncFlow SDK: asynchronous streaming reinforcement learning with any inference and any training engine.

    import asyncflow_sdk as af

Names load at first use. Importing this package loads no engine, no torch and no sockets.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__ as __version__

if TYPE_CHECKING:
    from .algorithms import CISPO as CISPO
    from .algorithms import DAPO as DAPO
    from .algorithms import GRPO as GRPO
    from .algorithms import GSPO as GSPO
    from .algorithms import KL as KL
    from .algorithms import PPO as PPO
    from .algorithms import Critic as Critic
    from .algorithms import DrGRPO as DrGRPO
    from .algorithms import OffPolicy as OffPolicy
    from .algorithms import Overlong as Overlong
    from .algorithms import PolicyGradient as PolicyGradient
    from .algorithms import dynamic_sampling as dynamic_sampling
    from .cli.live_view import LiveView as LiveView
    from .cli.report.page import write_report as write_report
    from .errors import AccessDenied as AccessDenied
    from .errors import AsyncFlowError as AsyncFlowError
    from .errors import ConfigError as ConfigError
    from .errors import DeadlineExceeded as DeadlineExceeded
    from .errors import DigestMismatch as DigestMismatch
    from .errors import Ended as Ended
    from .errors import EngineError as EngineError
    from .errors import EngineGone as EngineGone
    from .errors import Interrupted as Interrupted
    from .errors import LeaseLost as LeaseLost
    from .errors import MemoryFull as MemoryFull
    from .errors import PayloadLost as PayloadLost
    from .errors import PluginError as PluginError
    from .errors import ProtocolError as ProtocolError
    from .errors import SchemaError as SchemaError
    from .errors import ServerLost as ServerLost
    from .errors import StepAborted as StepAborted
    from .errors import StoreUnavailable as StoreUnavailable
    from .errors import VersionGone as VersionGone
    from .errors import VersionNeeded as VersionNeeded
    from .errors import WeightError as WeightError
    from .errors import WeightMismatch as WeightMismatch
    from .errors import WireError as WireError
    from .errors import WorkerFailed as WorkerFailed
    from .errors import WriteOnceError as WriteOnceError
    from .interfaces import TRAIN_COLUMNS as TRAIN_COLUMNS
    from .interfaces import Algorithm as Algorithm
    from .interfaces import Capabilities as Capabilities
    from .interfaces import Completion as Completion
    from .interfaces import Completions as Completions
    from .interfaces import Consumer as Consumer
    from .interfaces import LeasedBatch as LeasedBatch
    from .interfaces import LeasedStep as LeasedStep
    from .interfaces import PackedTokens as PackedTokens
    from .interfaces import Producer as Producer
    from .interfaces import Request as Request
    from .interfaces import RolloutEngine as RolloutEngine
    from .interfaces import StepConsumer as StepConsumer
    from .interfaces import StepPart as StepPart
    from .interfaces import StepResult as StepResult
    from .interfaces import TrainEngine as TrainEngine
    from .interfaces import TransferQueue as TransferQueue
    from .interfaces import WeightPublisher as WeightPublisher
    from .interfaces import WeightSubscriber as WeightSubscriber
    from .interfaces import WeightSync as WeightSync
    from .interfaces import WeightUpdate as WeightUpdate
    from .plugins import AdapterSpec as AdapterSpec
    from .plugins import hookimpl as hookimpl
    from .queue import StreamDataLoader as StreamDataLoader
    from .queue.recovery import replay as replay
    from .service import Trainer as Trainer
    from .types import Batch as Batch
    from .types import Chat as Chat
    from .types import Checkpoint as Checkpoint
    from .types import Probe as Probe
    from .types import Ragged as Ragged
    from .types import Sampling as Sampling
    from .types import Staleness as Staleness
    from .types import Store as Store
    from .types import Weights as Weights
    from .workflow import Agent as Agent
    from .workflow import EngineProducer as EngineProducer
    from .workflow import Evaluation as Evaluation
    from .workflow import Generate as Generate
    from .workflow import HttpReward as HttpReward
    from .workflow import Logprobs as Logprobs
    from .workflow import Result as Result
    from .workflow import Rollout as Rollout
    from .workflow import Run as Run
    from .workflow import Stage as Stage
    from .workflow import Train as Train
    from .workflow import Turn as Turn
    from .workflow import Turns as Turns
    from .workflow import Workflow as Workflow
    from .workflow import ages_of as ages_of
    from .workflow import connect as connect
    from .workflow import load_prompts as load_prompts
    from .workflow import load_workflow as load_workflow
    from .workflow import read_steps as read_steps
    from .workflow import resume as resume
    from .workflow import serve as serve
    from .workflow import staleness_of as staleness_of

_NAMES = {
    "algorithms": "CISPO DAPO GRPO GSPO KL PPO Critic DrGRPO OffPolicy Overlong PolicyGradient dynamic_sampling",
    "cli.live_view": "LiveView",
    "cli.report.page": "write_report",
    "errors": (
        "AccessDenied AsyncFlowError ConfigError DeadlineExceeded DigestMismatch Ended EngineError EngineGone "
        "Interrupted LeaseLost MemoryFull PayloadLost PluginError ProtocolError SchemaError ServerLost "
        "StepAborted StoreUnavailable VersionGone VersionNeeded WeightError WeightMismatch WireError WorkerFailed WriteOnceError"
    ),
    "interfaces": (
        "TRAIN_COLUMNS Algorithm Capabilities Completion Completions Consumer LeasedBatch LeasedStep PackedTokens Producer"
        " Request RolloutEngine StepConsumer StepPart StepResult TrainEngine TransferQueue WeightPublisher WeightSubscriber"
        " WeightSync WeightUpdate"
    ),
    "plugins": "AdapterSpec hookimpl",
    "queue": "StreamDataLoader",
    "queue.recovery": "replay",
    "service": "Trainer",
    "types": "Batch Chat Checkpoint Probe Ragged Sampling Staleness Store Weights",
    "workflow": (
        "Agent EngineProducer Evaluation Generate HttpReward Logprobs Result Rollout Run Stage Train Turn Turns Workflow"
        " ages_of connect load_prompts load_workflow read_steps resume serve staleness_of"
    ),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted([*_MODULES, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
