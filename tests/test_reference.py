"""The reference is what the docstrings say."""

from __future__ import annotations

import runpy
from pathlib import Path

import asyncflow_sdk.interfaces as interfaces

DOCS = Path(__file__).parent.parent / "docs"


def test_the_reference_is_written_anew_when_docstrings_change() -> None:
    page = runpy.run_path(str(DOCS / "reference.py"))["page"]()

    assert (DOCS / "reference.md").read_text() == page, "run: python docs/reference.py"


def test_every_interface_is_in_it() -> None:
    page = (DOCS / "reference.md").read_text()
    classes = [name for name in interfaces.__all__ if isinstance(getattr(interfaces, name), type)]

    assert [name for name in classes if f"### `{name}`" not in page] == []
