"""What a test of memory opened is closed with it: a process may open a thousand files, and one runs all tests."""

from collections.abc import Iterator
from typing import Any

import pytest

from asyncflow_sdk.memory import Arena, Mapper


@pytest.fixture(autouse=True)
def close_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made: list[Any] = []
    for kind in (Arena, Mapper):
        monkeypatch.setattr(kind, "__init__", _counted(kind.__init__, made))
    yield
    for each in made:
        each.close(unlink=False) if isinstance(each, Arena) else each.close()


def _counted(begin: Any, made: list[Any]) -> Any:
    def init(self: Any, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        made.append(self)

    return init
