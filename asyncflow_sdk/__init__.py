"""AsyncFlow SDK: asynchronous streaming reinforcement learning with any inference and any training engine.

    import asyncflow_sdk as af

Names load when first used, so that importing this package loads no engine, no torch and no sockets.
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
    from .cli.live import LiveView as LiveView
    from .cli.report import write_report as write_report
    from .errors import AsyncFlowError as AsyncFlowError
    from .errors import ConfigError as ConfigError
    from .errors import DeadlineExceeded as DeadlineExceeded
    from .errors import Ended as Ended
    from .errors import EngineError as EngineError
    from .errors import EngineGone as EngineGone
    from .errors import Interrupted as Interrupted
    from .errors import LeaseLost as LeaseLost
    from .errors import PluginError as PluginError
    from .errors import SchemaError as SchemaError
    from .errors import WeightMismatch as WeightMismatch
    from .errors import WorkerFailed as WorkerFailed
    from .interfaces import TRAIN_COLUMNS as TRAIN_COLUMNS
    from .interfaces import Algorithm as Algorithm
    from .interfaces import Candidates as Candidates
    from .interfaces import Capabilities as Capabilities
    from .interfaces import Completion as Completion
    from .interfaces import Completions as Completions
    from .interfaces import Launcher as Launcher
    from .interfaces import PackedTokens as PackedTokens
    from .interfaces import Placement as Placement
    from .interfaces import Request as Request
    from .interfaces import RolloutEngine as RolloutEngine
    from .interfaces import Sampler as Sampler
    from .interfaces import StalenessPolicy as StalenessPolicy
    from .interfaces import StepResult as StepResult
    from .interfaces import StepWindow as StepWindow
    from .interfaces import TrackedRun as TrackedRun
    from .interfaces import Tracker as Tracker
    from .interfaces import TrainEngine as TrainEngine
    from .interfaces import WeightUpdate as WeightUpdate
    from .interfaces import WorkerExit as WorkerExit
    from .interfaces import WorkerHandle as WorkerHandle
    from .interfaces import WorkerSpec as WorkerSpec
    from .plugins import AdapterSpec as AdapterSpec
    from .plugins import hookimpl as hookimpl
    from .queue import StreamDataLoader as StreamDataLoader
    from .queue.replay import replay as replay
    from .service import Trainer as Trainer
    from .types import Batch as Batch
    from .types import Checkpoint as Checkpoint
    from .types import Probe as Probe
    from .types import Ragged as Ragged
    from .types import Sampling as Sampling
    from .types import Staleness as Staleness
    from .types import TokenAges as TokenAges
    from .types import VersionSpan as VersionSpan
    from .types import Weights as Weights
    from .workflow import Agent as Agent
    from .workflow import Consumer as Consumer
    from .workflow import Generate as Generate
    from .workflow import Logprobs as Logprobs
    from .workflow import Producer as Producer
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
    from .workflow import run_worker as run_worker
    from .workflow import serve as serve
    from .workflow import staleness_of as staleness_of

_WHERE = {
    "TRAIN_COLUMNS": "interfaces",
    "AdapterSpec": "plugins",
    "Algorithm": "interfaces",
    "AsyncFlowError": "errors",
    "EngineError": "errors",
    "EngineGone": "errors",
    "SchemaError": "errors",
    "WeightMismatch": "errors",
    "ConfigError": "errors",
    "PluginError": "errors",
    "WorkerFailed": "errors",
    "Interrupted": "errors",
    "LeaseLost": "errors",
    "Ended": "errors",
    "DeadlineExceeded": "errors",
    "Batch": "types",
    "Candidates": "interfaces",
    "Checkpoint": "types",
    "Capabilities": "interfaces",
    "Completion": "interfaces",
    "Completions": "interfaces",
    "StepWindow": "interfaces",
    "CISPO": "algorithms",
    "DAPO": "algorithms",
    "GRPO": "algorithms",
    "GSPO": "algorithms",
    "KL": "algorithms",
    "PPO": "algorithms",
    "Critic": "algorithms",
    "DrGRPO": "algorithms",
    "OffPolicy": "algorithms",
    "Overlong": "algorithms",
    "PolicyGradient": "algorithms",
    "dynamic_sampling": "algorithms",
    "Probe": "types",
    "Ragged": "types",
    "Request": "interfaces",
    "RolloutEngine": "interfaces",
    "Sampler": "interfaces",
    "Sampling": "types",
    "Staleness": "types",
    "TokenAges": "types",
    "StalenessPolicy": "interfaces",
    "StepResult": "interfaces",
    "StreamDataLoader": "queue",
    "TrackedRun": "interfaces",
    "Tracker": "interfaces",
    "TrainEngine": "interfaces",
    "Trainer": "service",
    "VersionSpan": "types",
    "WeightUpdate": "interfaces",
    "Weights": "types",
    "Launcher": "interfaces",
    "PackedTokens": "interfaces",
    "Placement": "interfaces",
    "WorkerExit": "interfaces",
    "WorkerHandle": "interfaces",
    "WorkerSpec": "interfaces",
    "LiveView": "cli.live",
    "hookimpl": "plugins",
    "write_report": "cli.report",
    "Agent": "workflow",
    "Consumer": "workflow",
    "Generate": "workflow",
    "Logprobs": "workflow",
    "Producer": "workflow",
    "Result": "workflow",
    "Rollout": "workflow",
    "Run": "workflow",
    "Stage": "workflow",
    "Train": "workflow",
    "Turn": "workflow",
    "Turns": "workflow",
    "Workflow": "workflow",
    "ages_of": "workflow",
    "connect": "workflow",
    "load_prompts": "workflow",
    "load_workflow": "workflow",
    "read_steps": "workflow",
    "replay": "queue.replay",
    "resume": "workflow",
    "run_worker": "workflow",
    "serve": "workflow",
    "staleness_of": "workflow",
}
__all__ = sorted([*_WHERE, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
