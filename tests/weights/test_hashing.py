"""Digests of a version are those of its bytes, whoever copied them, and what a thread copied it has hashed by then."""

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from asyncflow_sdk.types.manifest import digest
from asyncflow_sdk.weights import filling
from asyncflow_sdk.weights.copying import NumpySource
from asyncflow_sdk.weights.hashing import Hashing
from asyncflow_sdk.weights.staging import Staging
from asyncflow_sdk.weights.writing import Writer

BUCKET = 4096


class Counted(Executor):
    """One that hashes at once, and knows how many buckets it was given."""

    def __init__(self) -> None:
        self.buckets = 0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.buckets += 1
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


@pytest.fixture
def staging() -> Iterator[Staging]:
    staging = Staging.private("hashing")
    yield staging
    staging.close()


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def written(
    staging: Staging, weights: dict[str, Any], behind: Executor, *, lasting: bool = False, **policy: Any
) -> list[tuple[bytes, ...]]:
    """The digests, which are those of the bytes that lie there."""
    hashing = Hashing(behind)
    Writer(1, staging.room, hashing, bucket_bytes=BUCKET, **policy).write(weights.items(), lasting=lasting)
    staging.seal(1)
    there = [
        tuple(digest(memoryview(chunk[at : at + BUCKET])) for at in range(0, len(chunk), BUCKET))  # type: ignore[arg-type]
        for chunk in staging.chunks(1)
    ]
    found = hashing.digests()
    assert found == there
    return found


def of_all_kinds() -> dict[str, Any]:
    """Of the sizes that lie across buckets, fill them, and leave room between: plain, strided, and of numpy."""
    sizes = (1, 63, BUCKET, 5 * BUCKET + 7, 64, 3 * BUCKET - 64)
    numbers = np.random.default_rng(3)
    made: dict[str, Any] = {}
    for n, size in enumerate(sizes):
        values = numbers.standard_normal((2, size)).astype(np.float32)
        made |= {
            f"torch{n}": torch.from_numpy(values[0]),
            f"numpy{n}": values[1],
            f"strided{n}": torch.from_numpy(values).t(),
        }
    return made


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_digests_are_of_the_bytes_whoever_copied_them(
    staging: Staging, threads: None, monkeypatch: pytest.MonkeyPatch, dtype: str | None
) -> None:
    monkeypatch.setattr(filling, "PIECE_BYTES", 1000)
    found = []
    for count, helped, lasting in itertools.product((1, 2), (False, True), (False, True)):
        torch.set_num_threads(count)
        with ThreadPoolExecutor(1) as behind:
            helper = behind if helped else None
            found.append(written(staging, of_all_kinds(), behind, lasting=lasting, helper=helper, dtype=dtype))
    assert all(each == found[0] for each in found)


def test_a_helper_copies_what_it_can_while_the_other_one_does(staging: Staging) -> None:
    # given copies that wait for one another
    both, source = threading.Barrier(2), NumpySource.copy
    met: list[str] = []

    def meeting(self: Any, *arguments: Any) -> None:
        if not met:
            both.wait(30)
            met.append(threading.current_thread().name)
        source(self, *arguments)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1, "helper") as behind:
        patch.setattr(NumpySource, "copy", meeting)
        written(staging, {"w": np.ones(10 * BUCKET, np.uint8)}, behind, helper=behind)
    assert met
    # and nobody waits for one that does not come
    with ThreadPoolExecutor(1) as busy:
        gate = threading.Event()
        busy.submit(gate.wait, 60)
        written(staging, {"w": np.ones(10 * BUCKET, np.uint8)}, busy, helper=busy)
        gate.set()


@pytest.mark.parametrize("lasting", [True, False])
def test_nobody_copies_once_writing_has_failed(staging: Staging, lasting: bool) -> None:
    # given one who copies slowly, and an iterator that fails meanwhile
    copying, source = set(), NumpySource.copy

    def slowly(self: Any, *arguments: Any) -> None:
        copying.add(threading.get_ident())
        time.sleep(0.002)
        source(self, *arguments)
        copying.remove(threading.get_ident())

    def failing() -> Iterator[tuple[str, Any]]:
        for number in range(4):
            yield f"w{number}", np.ones(10 * BUCKET, np.uint8)
        raise RuntimeError("no more")

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as behind:
        patch.setattr(NumpySource, "copy", slowly)
        writer = Writer(1, staging.room, Hashing(behind), helper=behind, bucket_bytes=BUCKET)
        with pytest.raises(RuntimeError, match="no more"):
            writer.write(failing(), lasting=lasting)
        assert not copying
        # nor after a copy that fails, of either of them
        patch.setattr(NumpySource, "copy", lambda *given: 1 / 0)
        writer = Writer(1, staging.room, Hashing(behind), helper=behind, bucket_bytes=BUCKET)
        with pytest.raises(ZeroDivisionError):
            writer.write({"w": np.ones(10 * BUCKET, np.uint8)}.items(), lasting=lasting)


def test_what_one_thread_copies_is_hashed_by_it(staging: Staging, threads: None) -> None:
    # given
    plain = {name: value for name, value in of_all_kinds().items() if not name.startswith("strided")}
    torch.set_num_threads(1)
    behind = Counted()
    # when
    written(staging, plain, behind)
    # then nobody else was given anything
    assert behind.buckets == 0
    # but of what others copy, they are, and what comes after it is not hashed together with it
    torch.set_num_threads(2)
    written(staging, {"w": torch.ones(10 * BUCKET), "b": np.ones(10 * BUCKET, np.float32)}, behind)
    assert behind.buckets == 40


def test_nothing_is_hashed_without_digests(staging: Staging) -> None:
    sizes = Writer(1, staging.room, None, bucket_bytes=BUCKET).write({"w": np.ones(BUCKET)}.items())
    assert sizes == [8 * BUCKET]
