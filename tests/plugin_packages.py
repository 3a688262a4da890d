"""Distributions for tests, as pip leaves them: modules and a dist-info folder on a path."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import pytest

KEPT = Path(__file__).parent / "plugins/packages"
_choices = itertools.count(1)
HEAD = "import asyncflow_sdk as af\n@af.hookimpl\ndef asyncflow_adapters():\n"


def install(site: Path, package: str) -> None:
    """A package of the folder ``packages``."""
    project: dict[str, Any] = tomllib.loads((KEPT / package / "pyproject.toml").read_text())["project"]
    shutil.copytree(
        KEPT / package, site, dirs_exist_ok=True, ignore=shutil.ignore_patterns("pyproject.toml", "__pycache__")
    )
    write_info(
        site, project["name"], project["version"], project["entry-points"]["asyncflow_sdk"], project["dependencies"]
    )


def write_plugin(site: Path, name: str, body: str, *, version: str = "1.0", requires: Sequence[str] = ()) -> None:
    """A distribution with one module and one entry point of its name."""
    site.mkdir(parents=True, exist_ok=True)
    (site / f"{name}.py").write_text(body)
    write_info(site, name, version, {name: name}, requires)


def install_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, body: str) -> Path:
    """Install a plugin for one test, also for the processes that it starts. Returns its site folder."""
    site = tmp_path / "site"
    write_plugin(site, name, body)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", f"{site}:{os.environ.get('PYTHONPATH', '')}")
    before = os.environ.get("ASYNCFLOW_PLUGINS", "core,testing,torch")
    named = ",".join([before, *[name] * next(_choices)])  # plugins are looked for once by each choice
    monkeypatch.setenv("ASYNCFLOW_PLUGINS", named)
    return site


def write_info(site: Path, name: str, version: str, entries: Mapping[str, str], requires: Sequence[str]) -> None:
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = [f"Requires-Dist: {each}\n" for each in requires]
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{''.join(lines)}")
    (info / "entry_points.txt").write_text(
        "[asyncflow_sdk]\n" + "".join(f"{entry} = {value}\n" for entry, value in entries.items())
    )
