"""Proof of what an engine holds: what differs is named."""

import re
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
import torch

from asyncflow_sdk.errors import WeightError, WeightMismatch
from asyncflow_sdk.interfaces import TensorType, WeightUpdate
from asyncflow_sdk.types import Probe, dtype_name
from asyncflow_sdk.weights import check_held, check_names, check_probe

PROBE = Probe(((1, 2), (3,)), ((4, 5, 6), (7,)), ((-0.5, -1.0, -2.0), (-3.0,)), tolerance=0.01)


class Plain(WeightUpdate):
    """A version of arrays at hand."""

    def __init__(self, arrays: dict[str, Any], version: int = 3) -> None:
        self._arrays, self.version = arrays, version
        self.tensors = {name: TensorType(dtype_name(a.dtype), a.shape) for name, a in arrays.items()}

    def arrays(self) -> Iterator[tuple[str, Any]]:
        yield from self._arrays.items()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        raise AssertionError("proof needs no torch")

    def release(self) -> None:
        pass


def weights() -> dict[str, Any]:
    return {
        "w": np.arange(12, dtype=np.float32).reshape(3, 4),
        "b": np.arange(5).astype(ml_dtypes.bfloat16),
        "empty": np.empty((0, 4), np.float32),
        "scale": np.array(2.0, np.float64),
    }


def test_names_that_are_not_the_versions_are_listed() -> None:
    update = Plain({name: np.zeros(1, np.float32) for name in ("w", "b", "s")})
    check_names(update, {"w", "b", "s"})
    for names, reason in (
        ({"w"}, "version 3: 2 of 3 tensors were not taken by the engine: b, s$"),
        ({"w", "b", "s", "lm_head"}, "version 3: 1 of 3 tensors were never published: lm_head$"),
        (set(), "3 of 3 tensors were not taken by the engine: b, s, w"),
        ({"w", "b", "s", *(f"x{i:02}" for i in range(30))}, r"30 of 3 tensors.*and 20 more"),
    ):
        with pytest.raises(WeightMismatch, match=reason):
            check_names(update, names)


@pytest.mark.parametrize("kind", [list, tuple, frozenset, dict.fromkeys, iter])
def test_names_may_come_in_whatever_holds_them(kind: Any) -> None:
    check_names(Plain(weights()), kind(list(weights())))
    with pytest.raises(WeightMismatch, match="1 of 4 tensors were not taken by the engine: w$"):
        check_names(Plain(weights()), kind([name for name in weights() if name != "w"]))


@pytest.mark.parametrize("names", [None, "w", b"w", 4, True, [1, 2], [("w", 1)], [["w"]]])
def test_what_an_engine_returns_that_are_no_names_is_shown(names: Any) -> None:
    shown = re.escape(repr(names))
    with pytest.raises(
        WeightMismatch, match=f"^version 3: load_weights returned {shown}; return the set of names it took$"
    ):
        check_names(Plain(weights()), names)


def test_log_probs_within_the_tolerance_pass() -> None:
    check_probe(Plain(weights()), PROBE, [[-0.509, -0.991, -2.0], [-3.01 + 1e-9]])


@pytest.mark.parametrize(
    ("logprobs", "reason"),
    [
        ([[-0.5, -1.2, -2.0], [-3.5]], r"version 3: .*sequence 1 of the probe, token 0: log-prob -3.5, the trainer's -3,"),
        ([[-0.5, -1.2, -2.0], [-3.1]], r"sequence 0 of the probe, token 1: log-prob -1.2, the trainer's -1, 0.2 apart where 0.01"),
        ([[-0.5, float("nan"), -9.0], [-3.0]], "sequence 0 of the probe, token 1: log-prob nan"),
        ([[-0.5, -1.0, -2.0], [float("-inf")]], "sequence 1 of the probe, token 0: log-prob -inf"),
    ],
)  # fmt: skip
def test_the_worst_token_is_named(logprobs: Any, reason: str) -> None:
    ways = r".*af.Weights\(probe=af.Probe\(..., tolerance=...\)\) allows another, probe=False compares none$"
    with pytest.raises(WeightError, match=reason + ways) as caught:
        check_probe(Plain(weights()), PROBE, logprobs)
    assert not isinstance(caught.value, WeightMismatch)  # another load may go well


@pytest.mark.parametrize("logprobs", [[[-0.5, -1.0, -2.0]], [[-0.5, -1.0], [-3.0]], []])
def test_log_probs_of_something_else_are_refused(logprobs: Any) -> None:
    with pytest.raises(WeightMismatch, match=r"log-probs of lengths .* for a probe of \[3, 1\] tokens"):
        check_probe(Plain(weights()), PROBE, logprobs)


def test_a_trainer_that_computes_no_number_is_found_out() -> None:
    probe = msgspec.structs.replace(PROBE, logprobs=((-0.5, float("nan"), -2.0), (-3.0,)))
    with pytest.raises(WeightError, match="token 1.*the trainer's nan"):
        check_probe(Plain(weights()), probe, [[-0.5, -1.0, -2.0], [-3.0]])


def test_what_is_held_byte_for_byte_passes_in_any_order_and_of_any_kind() -> None:
    held = list(reversed(weights().items()))
    check_held(Plain(weights()), held)
    tensors = {name: torch.from_numpy(array) for name, array in weights().items() if name != "b"}
    tensors["b"] = torch.arange(5).to(torch.bfloat16)
    tensors["w"] = tensors["w"].t().contiguous().t()  # the same values, strided
    check_held(Plain(weights()), tensors.items())


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        ({"w": weights()["w"] + np.float32(1e-6)}, WeightError, "version 3: the bytes of 'w' that the engine holds are other"),
        ({"w": -weights()["w"] * 0}, WeightError, "the bytes of 'w'"),
        ({"w": weights()["w"].reshape(4, 3)}, WeightMismatch, r"holds 'w' as float32\[4, 3\], and .* as float32\[3, 4\]"),
        ({"b": weights()["b"].astype(np.float16)}, WeightMismatch, r"holds 'b' as float16\[5\].*as bfloat16\[5\]"),
        ({"b": None}, WeightMismatch, "1 of 4 tensors are not held by the engine: b"),
        ({"lm_head": np.zeros(1)}, WeightMismatch, "1 of 4 tensors were never published, and are held .*: lm_head"),
    ],
)  # fmt: skip
def test_the_first_tensor_that_differs_is_named(change: Any, error: type[Exception], reason: str) -> None:
    held = {name: array for name, array in (weights() | change).items() if array is not None}
    with pytest.raises(error, match=reason):
        check_held(Plain(weights()), held.items())


def test_negative_zero_is_not_zero() -> None:
    update = Plain({"w": np.zeros(3, np.float32)})
    with pytest.raises(WeightError, match="the bytes of 'w'"):
        check_held(update, [("w", -np.zeros(3, np.float32))])
