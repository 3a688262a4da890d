"""README, quickstart and guide, followed to the letter: files and commands, in order, in an empty folder and a fresh environment."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest
from children import warm_python
from documented import BLOCK, IN_CLONE, PAGES, written
from waiting import until

SAYS = {
    "README": ["live=0", "level reached: basic"],
    "quickstart": ["20 steps of"],
    "your-own-engine": ["those are of version", "balanced: True", "level reached: full", "Created wheel"],
}


def script(page: Path) -> str:
    """The page as one script. A block of Python is a file: its first line may be its name."""
    lines = ["set -euo pipefail"]
    for block in BLOCK.finditer(page.read_text()):
        text, named = block["text"], re.match(r"# (\S+\.\w+)\n", block["text"])
        if block["kind"] in ("python", "toml"):
            assert named or block["kind"] == "python", f"this block has no name: {text}"
            lines.append(f"cat > {named[1] if named else 'block.py'} <<'END'\n{text}END")
            lines += [] if named else ["python block.py"]
        elif block["fails"]:
            lines.append(f'if ({text.strip()}); then echo "this should have failed"; exit 9; fi')
        elif not all(words.startswith(IN_CLONE) for words in written(text)):
            lines.append(text)
    return "\n".join(lines)


def started_in(folder: Path) -> list[str]:
    """Processes that are at work in a folder or below it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.joinpath("cwd").resolve().is_relative_to(folder):
                found.append(process.name)
    return found


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
@pytest.mark.starts("asyncflow new-plugin", "asyncflow check", "asyncflow report")
def test_page_runs_as_it_stands(tmp_path: Path, page: Path) -> None:
    # given an environment that has what this one has; only pip runs under its own interpreter
    own = tmp_path / "env"
    venv.create(own)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(own)}))
    here = [sysconfig.get_path("purelib"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    (site / "here.pth").write_text("\n".join(f"import site; site.addsitedir({path!r})" for path in here if path))
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, command in (
        ("asyncflow", f"{warm_python()} -m asyncflow_sdk.cli"),
        ("python", warm_python()),
        ("pip", f"{own}/bin/python -m pip"),
    ):
        (commands / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (commands / name).chmod(0o755)
    env = {
        **os.environ, "PATH": f"{commands}:{os.environ['PATH']}", "PYTHONPATH": "", "VIRTUAL_ENV": str(own),
        "OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }  # fmt: skip

    folder = tmp_path / "user"
    folder.mkdir()

    # when
    done = subprocess.run(
        ["bash", "-c", script(page)], cwd=folder, env=env, capture_output=True, text=True, timeout=1100, check=False
    )

    # then
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-6000:]
    assert [text for text in SAYS[page.stem] if text not in said] == []
    until(lambda: not started_in(tmp_path), "the end of servers whose workers were killed")
