"""Runs and workflows: producers, consumers, stages, supervision."""

from .data import load_prompts
from .endpoints import connect, serve
from .evaluation import Evaluation
from .loops.agent import Agent, Turn, Turns
from .loops.producer import EngineProducer
from .loops.record_files import ages_of, read_steps, staleness_of
from .plan.toml import load_workflow
from .processes.command_launcher import CommandLauncher
from .processes.worker import run_worker
from .rewards import HttpReward
from .run import ConsumerOptions, Run
from .specs import Rollout, Stage, Train
from .work import Generate, Logprobs
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
