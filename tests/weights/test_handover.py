"""What an engine's processes read is what was handed over: from where it lies, or from one copy."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from replicas import LIMIT_S, Served
from waiting import in_thread

from asyncflow_sdk.errors import WeightError, WeightMismatch
from asyncflow_sdk.interfaces import TensorType, WeightUpdate
from asyncflow_sdk.types import Shard
from asyncflow_sdk.weights import host
from asyncflow_vllm.handover import Handover, decode_handover, map_handover

READER = """
import hashlib, json, sys
from asyncflow_vllm.handover import map_handover
print(json.dumps([(name, str(array.dtype), array.shape, hashlib.sha256(array.tobytes()).hexdigest())
                  for name, array in map_handover(sys.stdin.read())]))
"""


@pytest.fixture
def handover() -> Iterator[Handover]:
    handover = Handover()
    yield handover
    handover.close()


def weights(seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {
        "a": random.standard_normal((7, 5)), "b": random.standard_normal(3).astype(ml_dtypes.bfloat16),
        "scalar": np.array(3.0), "none": np.empty((0, 4)), "bytes": np.arange(9, dtype=np.uint8),
    }  # fmt: skip


def as_read(arrays: Any) -> list[Any]:
    return [[n, str(a.dtype), list(a.shape), hashlib.sha256(a.tobytes()).hexdigest()] for n, a in arrays]


def test_another_process_reads_what_lies_in_shared_memory_there(served: Served, handover: Handover) -> None:
    served.publish(1, {name: array for name, array in weights().items() if array.size})
    with served.newest() as update, handover.give(update) as told:
        done = subprocess.run([sys.executable, "-c", READER], input=told, capture_output=True, text=True, timeout=250)
        assert not done.returncode, done.stderr
        assert json.loads(done.stdout) == as_read(update.arrays())
    assert handover.nbytes == 0
    assert {Path(path).parent for path in decode_handover(told).files} == {served.directory}


def test_what_lies_in_private_memory_is_copied_into_memory_that_is_used_again(
    handover: Handover, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "identity", lambda: "")  # without shared memory, weights come into the process
    with Served("tcp") as served:
        held, files = set(), set()
        updates = iter(served.replica())
        for number in range(1, 4):
            served.publish(number, weights(number))
            with next(updates) as update:
                with handover.give(update) as told:
                    assert as_read(map_handover(told)) == as_read(update.arrays())
                held.add(handover.nbytes)
                files |= {(path, decode_handover(told).tensors[0].offset) for path in decode_handover(told).files}
    assert len(held) == len(files) == 1
    assert held != {0}


def test_what_came_in_pieces_is_put_together(served: Served, handover: Handover) -> None:
    whole = np.arange(35.0).reshape(7, 5)
    parts = [
        [("rows", Shard(whole[:3], (0, 0), (7, 5))), ("rest", np.ones(4))],
        [("rows", Shard(whole[3:], (3, 0), (7, 5)))],
    ]
    ranks = [served.trainer(f"rank{rank}", rank=rank, world_size=2) for rank in (0, 1)]
    publishing = [
        in_thread(lambda r=r, w=w: r.publish(1, w).wait(LIMIT_S)) for r, w in zip(ranks, parts, strict=True)
    ]
    assert [each().version for each in publishing] == [1, 1]
    with served.newest() as update, handover.give(update) as told:
        found = {name: array.tolist() for name, array in map_handover(told)}
        assert found == {"rows": whole.tolist(), "rest": [1] * 4}
        lies = {tensor.name: decode_handover(told).files[tensor.file] for tensor in decode_handover(told).tensors}
    assert Path(lies["rest"]).parent == served.directory  # whole in one part, so it is not copied
    assert Path(lies["rows"]).parent != served.directory


def test_a_file_that_is_gone_is_not_referred_to(served: Served, handover: Handover) -> None:
    """A publisher that took another's place removes what nobody may ask for any more; who has it mapped keeps it."""
    served.publish(1, {"a": np.ones(4)})
    with served.newest() as update:
        for path in served.directory.glob("w*"):
            path.unlink()
        with handover.give(update) as told:
            assert as_read(map_handover(told)) == as_read(update.arrays())


def test_what_is_written_into_there_harms_nobody(served: Served, handover: Handover) -> None:
    served.publish(1, {"a": np.ones(4)})
    with served.newest() as update, handover.give(update) as told:
        dict(map_handover(told))["a"][:] = 5

        assert dict(map_handover(told))["a"].tolist() == dict(update.arrays())["a"].tolist() == [1, 1, 1, 1]


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
        assert {name: array.tolist() for name, array in map_handover(told)} == {"a": [1] * 4, "b": [2] * 4}


def test_what_makes_no_sense_is_refused(served: Served, handover: Handover, tmp_path: Path) -> None:
    served.publish(3, {"a": np.ones(4, np.float32)})
    with served.newest() as update, handover.give(update) as told:
        good = decode_handover(told)
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
                list(map_handover(msgspec.json.encode(bad).decode()))
        (tmp_path / "link").symlink_to(good.files[0])
        for path in (tmp_path, tmp_path / "gone", tmp_path / "link"):
            bad = msgspec.structs.replace(good, files=(str(path),))
            with pytest.raises(WeightError, match="version 3: .* cannot be read here"):
                list(map_handover(msgspec.json.encode(bad).decode()))
    for text in ("", "{}", "[1]", told[:-5]):
        with pytest.raises(WeightError, match="cannot be read"):
            list(map_handover(text))
