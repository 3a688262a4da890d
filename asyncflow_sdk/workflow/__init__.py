"""Runs and workflows: producers, consumers, stages, supervision."""

from .data import load_prompts
from .endpoints import connect, serve
from .evaluation import Evaluation
from .events.step_files import ages_of, read_steps, staleness_of
from .plan.toml import load_workflow
from .rewards import HttpReward
from .rollout.agent import Agent, Turn, Turns
from .rollout.producer import EngineProducer
from .run import ConsumerOptions, Run
from .specs import Rollout, Stage, Train
from .work import Generate, Logprobs
from .workers.command_launcher import CommandLauncher
from .workers.worker import run_worker
from .workflow import Result, Workflow, resume

__all__ = [
    "Agent",
    "CommandLauncher",
    "ConsumerOptions",
    "EngineProducer",
    "Evaluation",
    "Generate",
    "HttpReward",
    "Logprobs",
    "Result",
    "Rollout",
    "Run",
    "Stage",
    "Train",
    "Turn",
    "Turns",
    "Workflow",
    "ages_of",
    "connect",
    "load_prompts",
    "load_workflow",
    "read_steps",
    "resume",
    "run_worker",
    "serve",
    "staleness_of",
]
