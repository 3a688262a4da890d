"""Close the arenas and mappers of each test: one process runs all tests, and may open a thousand files."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from asyncflow_sdk.memory import Arena, Mapper, SharedDirectory


@pytest.fixture(autouse=True)
def close_memory() -> Iterator[None]:
    with (
        patch.object(Arena, "__init__", autospec=True, side_effect=Arena.__init__) as arenas,
        patch.object(Mapper, "__init__", autospec=True, side_effect=Mapper.__init__) as mappers,
    ):
        yield
    for call in arenas.call_args_list:
        call.args[0].close(unlink=False)
    for call in mappers.call_args_list:
        call.args[0].close()


@pytest.fixture
def directory() -> Iterator[Path]:
    shared = SharedDirectory(Path("/dev/shm"))
    yield shared.path
    shared.close()
