"""What is published: the wheel and the sdist are inspected, installed in clean environments, and used there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
PACKAGES = (
    "asyncflow_sdk",
    *(f"asyncflow_{name}" for name in ("deepspeed", "fsdp", "http", "sglang", "torch", "vllm")),
)
RESOLVED = ("torch", "fsdp", "deepspeed", "text", "data", "http", "hub", "report", "kit", "docs", "dev")
"""Extras resolved here. Those of vllm and sglang would download their packages for CUDA."""
USE = """
import asyncflow_sdk as af

with af.serve("run") as run:
    run.queue.declare("length", needs=["word"], gives=["size"])
    run.queue.declare("end", needs=["size"])
    run.queue.put({"word": ["one", "three"]})
    with run.queue.get("length", 2, at_least=2) as batch:
        batch.complete({"size": [len(word) for word in batch["word"]]})
    with run.queue.get("end", 2, at_least=2) as batch:
        print(batch["size"].tolist(), run.queue.audit().balanced)
        batch.ack()
"""


def call(*command: str | Path, cwd: Path, **env: str) -> str:
    """Run a command without this project on its path, and return what it writes."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=inherited | env, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def interpreter(version: str) -> Path:
    """Return a Python of this version, of the system or of pyenv, or skip the test."""
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for found in (shutil.which(f"python{version}"), *sorted(home.glob(f"versions/{version}.*/bin/python"))):
        if found and subprocess.run([found, "-c", "import venv"], capture_output=True).returncode == 0:
            return Path(found)
    pytest.skip(f"there is no Python {version} here")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of a copy of the files in git, and the wheel built from it."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("dist")
    for name in subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0"):
        if name and (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    call(sys.executable, "-m", "build", "--outdir", out, cwd=copy)
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


def test_the_wheel_has_our_packages_with_their_data_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())

    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    tracked = subprocess.check_output(["git", "ls-files", "asyncflow_sdk", "adapters"], cwd=ROOT, text=True).split()
    assert {name.removeprefix("adapters/") for name in tracked} <= names, "every file of the packages, also templates"
    assert not [name for name in names if "/tests/" in name or name.endswith((".pyc", ".so"))]


def test_its_metadata_is_that_of_the_project(wheel: Path, built: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        (path,) = [name for name in file.namelist() if name.endswith(".dist-info/METADATA")]
        said = HeaderParser().parsestr(file.read(path).decode())
        entry_points = file.read(path.replace("METADATA", "entry_points.txt")).decode()

    assert said["Name"] == "asyncflow-sdk"
    assert said["Requires-Python"] == ">=3.10"
    assert said["License-Expression"] == "Apache-2.0"
    assert {*RESOLVED, "vllm", "sglang"} == set(said.get_all("Provides-Extra", []))
    assert "asyncflow = asyncflow_sdk.cli:main" in entry_points
    call(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir(), cwd=built)


def test_the_sdist_has_what_builds_and_tests_it(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as file:
        names = {name.split("/", 1)[1] for name in file.getnames() if "/" in name}

    assert {"pyproject.toml", "LICENSE", "README.md", "Makefile", "asyncflow_sdk/py.typed", "docs/queue.md"} <= names
    assert not [name for name in names if name.startswith((".venv", "runs/")) or name.endswith(".pyc")]


@pytest.mark.parametrize("version", VERSIONS)
def test_it_is_installed_and_used_in_a_clean_environment(version: str, wheel: Path, tmp_path: Path) -> None:
    call(interpreter(version), "-m", "venv", "env", cwd=tmp_path)
    python = tmp_path / "env/bin/python"
    call(python, "-m", "pip", "install", "--quiet", "--no-compile", wheel, cwd=tmp_path)

    assert call(python, "-c", USE, cwd=tmp_path) == "[3, 5] True\n"
    listed = call(tmp_path / "env/bin/asyncflow", "plugins", cwd=tmp_path, COLUMNS="200")
    assert "vllm" in listed
    assert "pip install" in listed, "engines that are missing, with the command"
    call(tmp_path / "env/bin/asyncflow", "new-plugin", "mine", "--kind", "rollout", cwd=tmp_path)
    call(python, "-m", "pip", "check", cwd=tmp_path)


@pytest.mark.parametrize("extra", RESOLVED)
def test_an_extra_resolves(extra: str, wheel: Path, tmp_path: Path) -> None:
    """With torch as it is in this environment, so that no other one is looked for."""
    said = call(sys.executable, "-m", "pip", "install", "--dry-run", f"{wheel}[{extra}]", cwd=tmp_path)

    assert "Would install" in said


@pytest.mark.starts("asyncflow demo")
def test_the_demo_runs_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    torch = os.environ.get("TORCH", "torch")
    call(sys.executable, "-m", "venv", "env", cwd=tmp_path)
    call("env/bin/python", "-m", "pip", "install", "--quiet", "--no-compile", torch, cwd=tmp_path)
    call("env/bin/python", "-m", "pip", "install", "--quiet", "--no-compile", f"{wheel}[torch,report]", cwd=tmp_path)

    call("env/bin/asyncflow", "demo", "--steps", "3", cwd=tmp_path, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")

    (report,) = tmp_path.glob("runs/*/report.html")
    assert "3" in report.read_text()
