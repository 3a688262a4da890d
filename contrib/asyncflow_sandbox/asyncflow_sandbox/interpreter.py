"""The files of a Python interpreter, as arguments of bubblewrap."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import asyncflow_sdk as af

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_ASK = "import sys; print(sys.prefix, sys.base_prefix, sep='\\n')"
_ANSWER_S = 60.0


@functools.cache
def located(python: str | None) -> tuple[str, tuple[str, ...]]:
    """Return the path of an interpreter, and the mounts it needs beside /tmp: the system's folders,
    its prefixes, and all symbolic links on the way to them."""
    found = shutil.which(python or sys.executable)
    if found is None:
        raise af.ConfigError(f"Sandbox: there is no interpreter {python!r} that this user may run")
    path = os.path.abspath(found)
    try:
        asked = subprocess.run(
            [path, "-I", "-c", _ASK], capture_output=True, text=True, timeout=_ANSWER_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        raise af.ConfigError(f"Sandbox: {path} is no Python that runs: {reason}") from error
    trees = [each for each in _SYSTEM if os.path.isdir(each) and not os.path.islink(each)]
    links = {each: os.readlink(each) for each in _SYSTEM if os.path.islink(each)}
    for place in map(os.path.abspath, (*asked.stdout.splitlines()[::-1], path)):
        real = Path(place).resolve()
        if real != Path("/") and not _shown(real, trees):
            trees.append(str(real))
        links |= _links(Path(place))
    links = {each: target for each, target in links.items() if not _shown(Path(each).parent, trees)}
    above = [str(each) for path in (*trees, *links) for each in reversed(Path(path).parents) if each != Path("/")]
    return path, (
        *(arg for each in dict.fromkeys(above) for arg in ("--perms", "0755", "--dir", each)),
        *(arg for each in trees for arg in ("--ro-bind", each, each)),
        *(arg for each, target in links.items() for arg in ("--symlink", target, each)),
    )


def _shown(path: Path, trees: list[str]) -> bool:
    return any(path.is_relative_to(tree) for tree in trees)


def _links(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each symbolic link on the way to a file, with its target."""
    for each in (*reversed(path.parents), path):
        if each.is_symlink():
            target = os.readlink(each)
            yield str(each), target
            yield from _links(Path(os.path.normpath(each.parent / target / path.relative_to(each))))
            return
