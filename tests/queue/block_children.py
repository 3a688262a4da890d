"""What reader processes of the block tests do."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from children import hear, say

from asyncflow_sdk.errors import AsyncFlowError, LeaseLost
from asyncflow_sdk.memory import Arena, Mapper
from asyncflow_sdk.queue.blocks import Located, pack_columns, write
from asyncflow_sdk.queue.places import Places
from asyncflow_sdk.queue.reader import Reader
from asyncflow_sdk.types import Batch, ColumnSpec

SCHEMA = {"x": ColumnSpec("fixed", "int64"), "r": ColumnSpec("ragged", "int64")}


def read_while_it_changes(directory: str) -> None:
    """Read rows as often as they are said; each must be whole."""
    reader = Reader(Mapper(Path(directory)))
    outcome: dict[str, Any] = {"right": 0, "lost": 0, "wrong": []}
    while outcome["right"] + outcome["lost"] + len(outcome["wrong"]) < 300:
        located = msgspec.msgpack.decode(bytes.fromhex(hear()), type=Located)
        try:
            columns = reader.read(located, SCHEMA)
        except LeaseLost:
            outcome["lost"] += 1
            continue
        x, offsets = columns["x"].values, columns["r"].offsets
        assert offsets is not None
        whole = np.array_equal(columns["r"].values, np.repeat(x, np.diff(offsets)))
        if whole and np.array_equal(np.diff(offsets), 4 * x):
            outcome["right"] += 1
        else:
            outcome["wrong"].append(x.tolist())
    say(outcome)
    while hear() != "end":
        pass


def read_damaged(directory: str, seed: int, times: int) -> None:
    """Read blocks after bytes of them were changed; look at every byte that comes."""
    numbers = np.random.default_rng(seed)
    arena, places, reader = Arena(Path(directory), "s1-", 1 << 16), Places(), Reader(Mapper(Path(directory)))
    values = {
        "x": np.arange(40.0).reshape(4, 10), "r": [np.arange(n, dtype=np.int32) for n in (3, 0, 700, 5)],
        "t": ["a", "", "ccc", "dd"], "z": np.empty((4, 0)),
    }  # fmt: skip
    packed = pack_columns(values)
    schema = {name: column.spec for name, column in packed.items()}
    blocks = []
    for _ in range(10):
        block, space = write(arena, packed)
        places.put(4 * len(blocks), block, "p", 1)
        blocks.append((space.memory, space.memory.copy()))
    outcome: dict[str, Any] = {"read": 0, "refused": 0, "strange": []}
    for _ in range(times):
        # given
        for memory, good in blocks:
            memory[:] = good
        for _ in range(int(numbers.integers(1, 4))):
            memory, _ = blocks[int(numbers.integers(len(blocks)))]
            words = memory[: len(memory) // 8 * 8].view(np.int64)
            at = int(numbers.integers(2, 20 if numbers.random() < 0.7 else len(words)))
            words[at] = numbers.choice([-1, 0, 1, 63, 64, len(memory), 1 << 31, 1 << 62, -(1 << 63), words[at] ^ 64])
        # when
        ids = numbers.permutation(40)[: int(numbers.integers(1, 40))]
        if numbers.random() < 0.5:
            ids = np.arange(4) + 4 * int(numbers.integers(10))
        try:
            found: dict[str, Any] = {}
            for part in places.locate(ids, tuple(values)):
                found.update(reader.read(part, schema))
            batch = Batch(ids, ids, found)
            for name in values:
                batch[name]
                np.asarray(found[name].values).tobytes()
        except AsyncFlowError:
            outcome["refused"] += 1
        except Exception as error:
            outcome["strange"].append(repr(error))
        else:
            outcome["read"] += 1
    say(outcome)
