"""What an engine's processes read is what was handed over: from where it lies, or from one copy."""

import hashlib
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from written import Sent, send

from asyncflow_sdk.errors import WeightError, WeightMismatch
from asyncflow_sdk.interfaces import Fetched, TensorType, WeightUpdate
from asyncflow_sdk.memory import SharedDirectory
from asyncflow_sdk.types import Shard
from asyncflow_sdk.weights import Handover, Update, handed_over, read_handed
from asyncflow_sdk.weights.shm import ShmReceiver, ShmSender

READER = """
import hashlib, json, sys
from asyncflow_sdk.weights import handed_over
print(json.dumps([(name, str(array.dtype), array.shape, hashlib.sha256(array.tobytes()).hexdigest())
                  for name, array in handed_over(sys.stdin.read())]))
"""


@pytest.fixture
def shared() -> Iterator[SharedDirectory]:
    shared = SharedDirectory(Path("/dev/shm"))
    yield shared
    shared.close()


@pytest.fixture
def handover() -> Iterator[Handover]:
    handover = Handover()
    yield handover
    handover.close()


_numbers = itertools.count()


def weights(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {
        "a": torch.randn(7, 5), "b": torch.randn(3).to(torch.bfloat16), "scalar": torch.tensor(3.0), "none": torch.empty(0, 4),
        "bytes": torch.arange(9, dtype=torch.uint8), "c": torch.randn(2, 3, 4),
    }  # fmt: skip


def read_elsewhere(told: str) -> list[Any]:
    """In another process: names, dtypes, shapes and digests."""
    done = subprocess.run([sys.executable, "-c", READER], input=told, capture_output=True, text=True, timeout=60)
    assert not done.returncode, done.stderr
    return list(json.loads(done.stdout))


def as_read(update: WeightUpdate) -> list[Any]:
    return [
        [name, str(array.dtype), list(array.shape), hashlib.sha256(array.tobytes()).hexdigest()]
        for name, array in update.arrays()
    ]


def sent(shared: SharedDirectory, tensors: Any) -> Sent:
    return send(ShmSender(shared.path, f"{next(_numbers)}-0"), 3, list(tensors.items()))


def in_private_memory(fetched: Fetched, version: int = 3) -> Update:
    """As a version that came over a network."""
    return Update(version, [Fetched(fetched.manifest, [chunk.copy() for chunk in fetched.chunks])])


def test_what_lies_in_shared_memory_is_read_there(shared: SharedDirectory, handover: Handover) -> None:
    version = sent(shared, {name: t for name, t in weights().items() if t.numel()})
    update = version.update(ShmReceiver(shared.path))

    with handover.give(update) as told:
        assert read_elsewhere(told) == as_read(update)

    assert handover.nbytes == 0
    assert {Path(path).parent for path in read_handed(told).files} == {shared.path}


def test_what_lies_in_private_memory_is_copied_into_memory_that_is_used_again(
    shared: SharedDirectory, handover: Handover
) -> None:
    held, files = set(), set()
    for number in range(3):
        version = sent(shared, weights(number))
        update = in_private_memory(version.fetched(ShmReceiver(shared.path)))

        with handover.give(update) as told:
            assert read_elsewhere(told) == as_read(update)

        held.add(handover.nbytes)
        files |= {(path, read_handed(told).tensors[0].offset) for path in read_handed(told).files}
    assert len(held) == len(files) == 1
    assert held != {0}


def test_what_came_in_pieces_is_put_together(shared: SharedDirectory, handover: Handover) -> None:
    whole = torch.randn(7, 5)
    parts = (
        [("rows", Shard(whole[:3], (0, 0), (7, 5))), ("rest", torch.ones(4))],
        [("rows", Shard(whole[3:], (3, 0), (7, 5)))],
    )
    fetched = []
    for rank, part in enumerate(parts):
        sender = ShmSender(shared.path, f"{rank}-0", rank=rank)
        fetched.append(send(sender, 3, part).fetched(ShmReceiver(shared.path)))
    update = Update(3, fetched)

    with handover.give(update) as told:
        assert read_elsewhere(told) == as_read(update)
        lies = {tensor.name: read_handed(told).files[tensor.file] for tensor in read_handed(told).tensors}

    assert Path(lies["rest"]).parent == shared.path  # whole in one part, so it is not copied
    assert Path(lies["rows"]).parent != shared.path


def test_a_file_that_is_gone_is_not_told_of(shared: SharedDirectory, handover: Handover) -> None:
    """A publisher that took another's place removes what nobody may ask for any more; who has it mapped keeps it."""
    version = sent(shared, {"a": torch.ones(4)})
    update = version.update(ShmReceiver(shared.path))
    for path in shared.path.glob("w*"):
        path.unlink()

    with handover.give(update) as told:
        assert read_elsewhere(told) == as_read(update)


def test_what_is_written_into_there_harms_nobody(shared: SharedDirectory, handover: Handover) -> None:
    version = sent(shared, {"a": torch.ones(4)})
    update = version.update(ShmReceiver(shared.path))

    with handover.give(update) as told:
        dict(handed_over(told))["a"][:] = 5

        assert dict(handed_over(told))["a"].tolist() == dict(update.arrays())["a"].tolist() == [1, 1, 1, 1]


class Odd(WeightUpdate):
    """It brings ``tensors``, and announces others."""

    version, root = 3, ""

    def __init__(self, announced: dict[str, TensorType], tensors: dict[str, Any]) -> None:
        self.tensors, self._tensors = announced, tensors

    def arrays(self) -> Iterator[tuple[str, Any]]:
        return iter(self._tensors.items())

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        raise AssertionError("torch is not needed")

    def release(self) -> None:
        pass


def test_an_update_that_is_not_what_it_announced_is_refused(handover: Handover) -> None:
    announced = {"a": TensorType("float32", (4,)), "b": TensorType("float32", (4,))}
    four = np.ones(4, np.float32)
    with (
        pytest.raises(WeightMismatch, match="announced b, and did not bring it"),
        handover.give(Odd(announced, {"a": four})),
    ):
        pass
    with (
        pytest.raises(WeightMismatch, match=r"b came as float64\[4\], and was announced as float32\[4\]"),
        handover.give(Odd(announced, {"a": four, "b": np.ones(4)})),
    ):
        pass
    with handover.give(Odd(announced, {"a": four, "b": four + 1, "c": four})) as told:  # and then one that is
        assert {name: array.tolist() for name, array in handed_over(told)} == {"a": [1] * 4, "b": [2] * 4}


def test_what_makes_no_sense_is_refused(shared: SharedDirectory, handover: Handover, tmp_path: Path) -> None:
    version = sent(shared, {"a": torch.ones(4)})
    with handover.give(version.update(ShmReceiver(shared.path))) as told:
        good = read_handed(told)
        (tensor,) = good.tensors
        for wrong in (
            {"offset": -4},
            {"offset": 2},
            {"offset": 1 << 40},
            {"shape": (1 << 40,)},
            {"shape": (-1, -4)},
            {"file": 1},
        ):
            bad = msgspec.structs.replace(good, tensors=(msgspec.structs.replace(tensor, **wrong),))  # type: ignore[arg-type]
            with pytest.raises(WeightError, match="'a'"):
                list(handed_over(msgspec.json.encode(bad).decode()))
        (tmp_path / "link").symlink_to(good.files[0])
        for path in (tmp_path, tmp_path / "gone", tmp_path / "link"):
            bad = msgspec.structs.replace(good, files=(str(path),))
            with pytest.raises(WeightError, match="version 3: .* cannot be read here"):
                list(handed_over(msgspec.json.encode(bad).decode()))
    for text in ("", "{}", "[1]", told[:-5]):
        with pytest.raises(WeightError, match="cannot be read"):
            list(handed_over(text))
