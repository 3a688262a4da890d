"""The reference is what the docstrings say."""

from __future__ import annotations

import importlib
import re
import runpy
from pathlib import Path
from types import ModuleType

import pytest
import typer

import asyncflow_sdk as af
from asyncflow_sdk import errors, interfaces, testing
from asyncflow_sdk.cli.app import app

pytestmark = pytest.mark.fast
DOCS = Path(__file__).parent.parent / "docs"


def test_the_reference_is_written_anew_when_docstrings_change() -> None:
    page = runpy.run_path(str(DOCS / "reference.py"))["page"]()

    assert (DOCS / "reference.md").read_text() == page, "run: python docs/reference.py"


def test_the_table_of_engines_is_written_anew_when_they_declare_something_else() -> None:
    script = runpy.run_path(str(DOCS / "engines.py"))

    assert (DOCS / "engines.md").read_text() == script["page"](), "run: python docs/engines.py"
    stale = [file.name for file, text in script["pages"]().items() if file.read_text() != text]
    assert stale == [], "run: python docs/engines.py"


@pytest.mark.parametrize(("module", "kind"), [(interfaces, type), (testing, object)])
def test_everything_that_plugins_use_is_in_it(module: ModuleType, kind: type) -> None:
    page = (DOCS / "reference.md").read_text()
    exported = {name: getattr(module, name) for name in module.__all__}
    names = [name for name, value in exported.items() if callable(value) and isinstance(value, kind)]

    assert [name for name in names if f"### `{name}`" not in page] == []


def test_everything_that_users_call_is_in_it() -> None:
    page = (DOCS / "reference.md").read_text()
    exported = {name: getattr(af, name) for name in af.__all__ if name != "hookimpl"}
    names = [name for name, value in exported.items() if callable(value) and name not in vars(errors)]

    assert [name for name in names if f"### `{name}`" not in page] == []


def test_each_name_is_in_the_module_that_the_page_says() -> None:
    page = (DOCS / "reference.md").read_text().split("\n## The command")[0]
    module, wrong = "", []

    for head, name, place in re.findall(r"^(###?) `?(\w[\w ]*)`?\n\n(.*)", page, re.M):
        said = re.search(r"\bIn `(asyncflow_sdk\.\w+)`\.$", place)
        if head == "##":
            module = said[1] if said else af.__name__
        elif name not in importlib.import_module(own := said[1] if said else module).__all__ or (
            own != af.__name__ and hasattr(af, name)
        ):
            wrong.append(name)
    assert wrong == []


def test_every_error_is_in_it_and_in_the_tree() -> None:
    page = (DOCS / "reference.md").read_text()
    names = [name for name, value in vars(errors).items() if isinstance(value, type)]

    assert [name for name in names if f"| `{name}` |" not in page] == []
    assert [name for name in names if not re.search(rf"(^|─ ){name}\b", errors.__doc__ or "", re.M)] == []


def test_every_command_is_in_it() -> None:
    page = (DOCS / "reference.md").read_text()
    said = typer.main.get_command(app)

    assert [name for name in said.commands if f"### `asyncflow {name}" not in page] == []  # type: ignore[attr-defined]
