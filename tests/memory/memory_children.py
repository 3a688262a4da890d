"""Reader and writer processes of the memory tests."""

import hashlib
import os
import time
from pathlib import Path

from children import hear, say

from asyncflow_sdk.errors import AsyncFlowError
from asyncflow_sdk.memory import Arena, Mapper, SharedDirectory


def digest(view: object) -> str:
    return hashlib.sha256(view).hexdigest()  # type: ignore[arg-type]


def read(directory: str, place: list[object]) -> None:
    """Hold a view; report its digest now, and again on request."""
    view = Mapper(Path(directory)).view(*place)  # type: ignore[arg-type]
    say(digest(view))
    while hear() == "again":
        say(digest(view))


def read_and_fork(directory: str, place: list[object]) -> None:
    """Hold a view; fork a child that releases its copy of the view, and one that tries to read and write."""
    mapper, arena = Mapper(Path(directory)), Arena(Path(directory), "forked")
    arena.allocate(10)
    view = mapper.view(*place)  # type: ignore[arg-type]
    before = digest(view)
    if not (first := os.fork()):
        del view
        os._exit(0)
    if not (second := os.fork()):
        refused = 0
        for attempt in (lambda: mapper.view(*place), lambda: mapper.private_view(*place), lambda: arena.allocate(1)):  # type: ignore[arg-type]
            try:
                attempt()
            except AsyncFlowError as error:
                refused += "fork()" in str(error)
        mapper.close()
        os._exit(refused)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in (first, second)]
    say(codes)
    hear()
    say(digest(view) == before)


def view_at_exit(directory: str, place: list[object]) -> None:
    """Exit while the interpreter still holds views, also of a closed mapper."""
    global KEPT
    closed = Mapper(Path(directory))
    KEPT = (closed.view(*place), Mapper(Path(directory)).view(*place), closed)  # type: ignore[arg-type]
    closed.close()


def own(base: str) -> None:
    """Own a run's directory until killed."""
    directory = SharedDirectory(Path(base))
    (directory.path / "s1-1").write_bytes(b"payload")
    say(str(directory.path))
    hear()


def start_and_close(base: str, times: int) -> None:
    """Make and remove directories, like many runs starting at once."""
    hear()
    for _ in range(times):
        directory = SharedDirectory(Path(base))
        assert (directory.path / "owner").exists(), "swept away while its owner lives"
        time.sleep(0.0005)
        assert (directory.path / "owner").exists(), "swept away while its owner lives"
        directory.close()
    say("done")
