"""Close the arenas and mappers of each test: one process runs all tests, and may open a thousand files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncflow_sdk.memory import Arena, Mapper, SharedDirectory


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


@pytest.fixture
def directory() -> Iterator[Path]:
    shared = SharedDirectory(Path("/dev/shm"))
    yield shared.path
    shared.close()
