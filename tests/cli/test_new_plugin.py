"""asyncflow new-plugin: what it writes is installed, found, typed, formatted, and passes the kit as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from children import warm_python
from typer.testing import CliRunner

from asyncflow_sdk.cli.app import app
from asyncflow_sdk.cli.new_plugin import KINDS, write_plugin
from asyncflow_sdk.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
BLOCKS = ROOT / "contrib/asyncflow_blocks"
"""The base of stores that keep blocks: a package of its own."""


def installed(folder: Path, site: Path) -> dict[str, str]:
    """An environment in which the package of ``folder`` is installed, as pip leaves it behind."""
    project: Any = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = "\n".join(f"{k} = {v}" for k, v in project["entry-points"]["asyncflow_sdk"].items())
    (info / "entry_points.txt").write_text(f"[asyncflow_sdk]\n{points}\n")
    path = os.pathsep.join([str(site), str(folder), str(BLOCKS), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def run(*command: str, cwd: Path, env: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=570, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_passes_the_kit_as_it_is(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "my-own"
    write_plugin("my-own", kind, folder)
    env = installed(folder, tmp_path / "site")

    # test_guide.py asks the whole kit of a rollout engine
    some = {"rollout": ["-k", "greedy or capabilities"], "store": ["-k", "not processes"]}.get(kind, [])
    tests = [warm_python(), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    assert " passed" in run(*tests, *some, cwd=folder, env=env)
    listed = run(warm_python(), "-m", "asyncflow_sdk.cli", "plugins", cwd=folder, env=env)
    assert "my-own" in listed


def test_what_is_written_is_typed_and_formatted(tmp_path: Path) -> None:
    env = dict(os.environ)
    for kind in KINDS:
        write_plugin(f"my-{kind}", kind, tmp_path / kind)
    ruff = [sys.executable, "-m", "ruff", "check", "--no-cache", "--config", str(ROOT / "pyproject.toml"), "."]
    run(*ruff, cwd=tmp_path, env=env)
    packages = [str(tmp_path / kind / f"my_{kind}") for kind in KINDS]
    config = tmp_path / "mypy.ini"
    config.write_text(
        f"[mypy]\nstrict = true\nmypy_path = {ROOT}:{ROOT / 'adapters'}:{BLOCKS}\ncache_dir = {tmp_path / 'cache'}\nfollow_imports = silent\n"
        "[mypy-torch.*,transformers.*]\nignore_missing_imports = true\nfollow_imports = skip\n"
    )
    run(sys.executable, "-m", "mypy", "--config-file", str(config), *packages, cwd=tmp_path, env=env)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["My Engine", "--kind", "rollout"], "no name for a package"),
        (["class"], "cannot be imported"),
        (["numpy"], "would shadow the module"),
        (["random"], "would shadow the module"),
        (["shm", "--kind", "transport"], "a transport adapter is named 'shm' already"),
        (["mine", "--kind", "engine"], "there are rollout, train"),
    ],
)
def test_what_cannot_be_written_is_refused_and_nothing_is(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    result = CliRunner().invoke(app, ["new-plugin", *arguments])

    assert result.exit_code == 2
    assert says in " ".join(result.output.split())
    assert not list(tmp_path.iterdir())


def test_a_directory_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").touch()

    with pytest.raises(ConfigError, match="not empty"):
        write_plugin("mine", "rollout", tmp_path / "mine")

    assert [each.name for each in (tmp_path / "mine").iterdir()] == ["precious"]


def test_it_says_what_to_do_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    result = CliRunner().invoke(app, ["new-plugin", "my-engine"])

    assert result.exit_code == 0, result.output
    assert "asyncflow check my-engine --kind rollout" in result.output
    assert "pip install -e '.[test]'" in result.output
    assert (tmp_path / "my-engine" / "my_engine" / "py.typed").exists()
