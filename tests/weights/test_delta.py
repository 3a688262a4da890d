"""Deltas: every change there can be comes back bit by bit, small changes are small, and no code breaks who reads it."""

import struct
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow_sdk.errors import ProtocolError
from asyncflow_sdk.weights import delta

WIDTHS = st.sampled_from([1, 2, 4, 8])
NUMBERS = np.random.default_rng(0)


def bits(nbytes: int) -> Any:
    return NUMBERS.integers(0, 256, nbytes, np.uint8)


def back(new: Any, base: Any, width: int) -> float | None:
    """The share of its bucket that a code takes, after it was checked that it gives the bucket back."""
    before = base.copy()
    code = delta.encode(new, base, width)
    if code is None:
        return None
    out = bits(len(new))
    delta.apply(code, base, out)
    assert np.array_equal(out, new)
    assert np.array_equal(base, before)
    return len(code) / len(new)


@given(st.binary(max_size=3000), st.data(), WIDTHS)
@settings(max_examples=300, deadline=None)
def test_any_bytes_come_back(raw: bytes, data: st.DataObject, width: int) -> None:
    base = np.frombuffer(raw, np.uint8)
    new = base.copy()
    if raw:
        changes = data.draw(st.lists(st.tuples(st.integers(0, len(raw) - 1), st.integers(0, 255)), max_size=40))
        for place, value in changes:
            new[place] = value
    back(new, base, width)


@given(st.integers(0, 40_000), st.floats(0, 1), WIDTHS, st.integers(0, 1 << 30))
@settings(max_examples=100, deadline=None)
def test_any_share_of_words_comes_back(words: int, share: float, width: int, seed: int) -> None:
    numbers = np.random.default_rng(seed)
    base = numbers.integers(0, 256, words * width + seed % width, np.uint8)
    new = base.copy()
    inside = new[: words * width].view(f"u{width}")
    inside[numbers.random(words) < share] += np.array(numbers.integers(0, 3), f"u{width}")
    back(new, base, width)


SPECIAL = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}


@pytest.mark.parametrize("dtype", SPECIAL.values(), ids=SPECIAL)
def test_numbers_that_are_none_keep_their_bits(dtype: Any) -> None:
    width = np.dtype(dtype).itemsize
    base = np.zeros(100_000, dtype)
    new = base.copy()
    new[::1000] = -0.0
    new[1::1000], new[2::1000], new[3::1000] = np.nan, np.inf, -np.inf
    payload = np.frombuffer(bytes([1] * (width - 2) + [0xF1, 0xFF])[-width:], dtype)[0:1]
    assert np.isnan(payload.astype(np.float64)).all()
    new[4::1000] = payload
    share = back(new.view(np.uint8), base.view(np.uint8), width)
    assert share is not None
    assert share < 0.02
    assert back(base.view(np.uint8), new.view(np.uint8), width) is not None


def test_equal_bytes_and_a_single_one() -> None:
    same = bits(1 << 20)
    share = back(same, same.copy(), 2)
    assert share is not None
    assert share < 1e-3
    for nbytes in range(40):
        one = bits(nbytes)
        for width in (1, 2, 4, 8):
            back(one, one.copy(), width)
            back(one, bits(nbytes), width)


def test_what_has_nothing_in_common_is_not_worth_a_code() -> None:
    for width in (1, 2, 4, 8):
        assert delta.encode(bits(1 << 20), bits(1 << 20), width) is None


@pytest.mark.parametrize(("share", "most"), [(0.0125, 0.01), (0.12, 0.065), (0.47, 0.17), (1.0, 0.2)])
def test_steps_to_the_next_number_are_small(share: float, most: float) -> None:
    base = (NUMBERS.standard_normal(1 << 20) * 0.02).astype(ml_dtypes.bfloat16).view(np.uint16)
    new, moved = base.copy(), NUMBERS.random(len(base)) < share
    new[moved] += NUMBERS.choice(np.array([1, 65535], np.uint16), int(moved.sum()))
    found = back(new.view(np.uint8), base.view(np.uint8), 2)
    assert found is not None
    assert found <= most


def a_code(share: float = 0.02) -> tuple[bytes, Any, Any]:
    numbers = np.random.default_rng(1)
    base = numbers.integers(0, 256, 40_003, np.uint8)
    new = base.copy()
    inside = new[:40_000].view(np.uint16)
    inside[numbers.random(20_000) < share] += np.uint16(1)
    code = delta.encode(new, base, 2)
    assert code is not None
    return code, base, new


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_a_code_that_was_tampered_with_is_refused_or_makes_bytes(data: st.DataObject) -> None:
    code, base, _ = a_code(data.draw(st.sampled_from([0.0, 0.02, 0.9])))
    bad = bytearray(code)
    for _ in range(data.draw(st.integers(1, 4))):
        bad[data.draw(st.integers(0, min(len(bad) - 1, 100)))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(bad)))
    for broken in (bytes(bad), bytes(bad[:cut]), bytes(bad) + b"\0" * cut):
        out = np.zeros(len(base), np.uint8)
        try:
            delta.apply(broken, base, out)
        except ProtocolError:
            assert not out.any()


@given(st.binary(max_size=400))
def test_noise_is_refused(noise: bytes) -> None:
    out = np.zeros(1000, np.uint8)
    with pytest.raises(ProtocolError):
        delta.apply(noise, out.copy(), out)


def test_a_base_of_another_size_is_refused() -> None:
    code, base, new = a_code()
    with pytest.raises(ProtocolError, match="a delta of kind 1 of 40003 bytes"):
        delta.apply(code, base[:-8], np.empty_like(new[:-8]))


def packed(stream: bytes) -> bytes:
    made = zstandard.ZstdCompressor().compress(stream)
    return struct.pack("<I", len(made)) + made


BOMB = packed(b"\0" * (256 << 20))
LIES = bytearray(packed(b"\0" * 300))
LIES[8:10] = b"\xff\xff"


@pytest.mark.parametrize(
    ("count", "streams"),
    [
        (1000, BOMB * 3),
        (1000, BOMB[:200]),
        (0, BOMB),
        (1000, bytes(LIES) * 3),
        (1000, struct.pack("<I", 0xFFFFFFFF) + b"x"),
        (2, packed(b"\xff" * 2) + packed(b"\0" * 2) * 2),  # two that are passed over and no word
        (2, packed(b"\xfe\xfe" + b"\xff" * 8) + packed(b"\0" * 2) * 2),
        (1, packed(b"\xff" * 8 + b"\xfe") + packed(b"\0") * 2),  # beyond the end
        (3, packed(b"\xfe" * 3) + packed(b"\1" * 2) * 2),
    ],
)
def test_a_code_made_to_harm_takes_no_memory(count: int, streams: bytes) -> None:
    base = np.zeros(2000, np.uint8)
    out = np.zeros(2000, np.uint8)
    code = struct.pack("<BBxxII", 1, 2, 2000, count) + streams
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            delta.apply(code, base, out)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert not out.any()
