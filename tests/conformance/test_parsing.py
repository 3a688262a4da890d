"""A parse is whole, whatever the garbage collector calls in its midst."""

from __future__ import annotations

import ast
import contextlib
import gc
import inspect
from collections.abc import Iterator

import pytest

from asyncflow_sdk.testing.kit.parse_guard import BROKEN, whole_parses

SOURCE = inspect.getsource(contextlib)


@contextlib.contextmanager
def parsing_in_collections() -> Iterator[list[int]]:
    """Each collection parses something, from deeper in calls than what it interrupts; how often it did."""
    parsed: list[int] = []

    def parse(depth: int) -> None:
        if depth:
            return parse(depth - 1)
        gc.disable()
        ast.parse("x = (1, [2])")
        gc.enable()
        return parsed.append(1)

    def collected(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            parse(9)

    threshold = gc.get_threshold()
    gc.callbacks.append(collected)
    gc.set_threshold(50)
    try:
        yield parsed
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(collected)


@pytest.mark.skipif(not BROKEN, reason="this Python is not broken")
def test_here_a_parse_breaks_off_when_a_collection_parses() -> None:
    with parsing_in_collections(), pytest.raises(SystemError, match="recursion depth mismatch"):
        compile(SOURCE, "source", "exec", ast.PyCF_ONLY_AST)


def test_a_parse_is_whole_while_none_is_collected_in_its_midst() -> None:
    plain = ast.dump(ast.parse(SOURCE))

    with whole_parses(), parsing_in_collections() as parsed:
        held = [ast.dump(ast.parse(SOURCE)) for _ in range(3)]

    assert held == [plain] * 3
    assert gc.isenabled()
    assert parsed  # between them
