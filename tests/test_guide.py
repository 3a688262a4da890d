"""The guide to an engine of one's own, followed to the letter: its commands and files, in order, in a fresh environment."""

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
from waiting import until

GUIDE = Path(__file__).parent.parent / "docs" / "your-own-engine.md"
PART = re.compile(r"(?:<!-- (?P<mark>fails|test: guide) -->\n)?```(?P<kind>console|python)\n(?P<text>.*?)```", re.S)


def script() -> str:
    """The guide as one script."""
    lines = ["set -euo pipefail"]
    for part in PART.finditer(GUIDE.read_text()):
        mark, text = part["mark"] or "", part["text"]
        if part["kind"] == "python":
            assert mark == "test: guide", f"nobody runs this block: {text}"
            name = text.splitlines()[0].removeprefix("# ")
            lines.append(f"cat > {name} <<'END'\n{text}END")
        elif mark == "fails":
            lines.append(f'if ({text.strip()}); then echo "this should have failed"; exit 9; fi')
        else:
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
@pytest.mark.starts("asyncflow new-plugin", "asyncflow check", "asyncflow report")
def test_the_guide_to_an_own_engine(tmp_path: Path) -> None:
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

    # when

    done = subprocess.run(
        ["bash", "-c", script()], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=1100, check=False
    )

    # then
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-6000:]
    assert "those are of version" in said, "the fault that the guide makes was not named"
    assert "balanced: True" in said
    assert said.count("level reached: full") == 2
    until(lambda: not started_in(tmp_path), "the end of servers whose workers were killed")
    assert list((tmp_path / "my-engine" / "dist").glob("my_engine-*.whl"))
