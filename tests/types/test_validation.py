"""What people hand to constructors is looked at by the annotations of their parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.interfaces import Placement
from asyncflow_sdk.types.validation import check_fields, check_types, hint
from asyncflow_sdk.workflow.loops.engines import type_errors

pytestmark = pytest.mark.fast

if TYPE_CHECKING:
    from decimal import Decimal as Missing


@dataclass
class Made:
    number: float = 1.0
    count: int | None = None
    on: bool = False
    names: Sequence[str] | None = None
    which: Literal["a", "b"] = "a"
    ids: tuple[int, ...] = ()
    env: Mapping[str, str] | None = None
    work: Callable[..., Any] | str = "x"
    path: str | Path = ""
    anything: Any = None

    def __post_init__(self) -> None:
        check_fields(self)


@pytest.mark.parametrize(
    "fits",
    [
        {"number": 3}, {"number": np.float32(2)}, {"number": math.inf}, {"count": np.int64(3)}, {"count": None},
        {"names": ("a",)}, {"names": []}, {"which": "b"}, {"ids": [1, 2]}, {"ids": np.arange(3)}, {"env": {"A": "b"}},
        {"work": len}, {"path": Path("x")}, {"anything": object()}, {"on": np.True_},
    ],
)  # fmt: skip
def test_what_fits_passes(fits: dict[str, Any]) -> None:
    Made(**fits)


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ({"number": "3"}, "Made: number must be float, not str: '3'"),
        ({"number": True}, "number must be float, not bool"),
        ({"count": 3.0}, "count must be int or None, not float: 3.0"),
        ({"count": True}, "count must be int or None, not bool"),
        ({"on": 1}, "on must be bool, not int"),
        ({"names": "abc"}, "names must be a list of str or None, not str: 'abc'"),
        ({"names": ["a", 1]}, "names must be a list of str or None, not list"),
        ({"which": 3}, "which must be 'a' or 'b', not int: 3"),
        ({"which": "c"}, "which must be 'a' or 'b', not str: 'c'"),
        ({"ids": ["a"]}, "ids must be a list of int, not list"),
        ({"env": {"A": 1}}, "env must be a mapping of str to str or None, not dict"),
        ({"work": 3}, "work must be a function or str, not int"),
        ({"path": 3}, "path must be str or a path, not int"),
    ],
)
def test_what_does_not_fit_is_named(odd: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Made(**odd)
    assert said in str(caught.value)


def test_names_that_only_a_type_checker_knows_are_not_looked_at() -> None:
    class Theirs:
        def __init__(self, x: Unknown) -> None:  # type: ignore[name-defined]  # noqa: F821
            pass

    check_types(Theirs, {"x": 3})


def test_other_engines_words_for_no_limit_mean_none() -> None:
    off: Any = dict.fromkeys(("top_p", "top_k", "min_p", "repetition_penalty", "stop_ids", "stop"))
    whole: Any = 64.0

    assert af.Sampling(max_tokens=whole, **off) == af.Sampling(max_tokens=64, top_k=-1) == af.Sampling(max_tokens=64)
    assert not af.Sampling(**off).restrictions
    with pytest.raises(ConfigError, match="seed must be 0 or more, not -1; leave it out"):
        af.Sampling(seed=-1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: af.Sampling(max_tokens=1.5),  # type: ignore[arg-type]
        lambda: af.Sampling(max_tokens=None),  # type: ignore[arg-type]
        lambda: af.Sampling(top_k=-2),
        lambda: af.Sampling(seed=-1),
        lambda: af.Sampling(temperature=math.nan),
        lambda: af.Sampling(stop_ids="ab"),  # type: ignore[arg-type]
        lambda: af.Staleness(max_staleness=1.5),  # type: ignore[arg-type]
        lambda: af.Checkpoint(every="x"),  # type: ignore[arg-type]
        lambda: af.Weights(keep="x"),  # type: ignore[arg-type]
        lambda: af.GRPO(clip_high=math.nan),
        lambda: af.GRPO(epsilon=-1.0),
        lambda: Placement(env={"A=B": "c"}),
        lambda: Placement(env={"A": "\0"}),
        lambda: Placement(max_restarts=1.5),  # type: ignore[arg-type]
    ],
)
def test_configurations_are_looked_at_when_they_are_made(make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: af.Sampling(max_token=8), "Sampling has no argument 'max_token'; did you mean 'max_tokens'?"),
        (lambda: af.Sampling(stops="a"), "Sampling has no argument 'stops'; did you mean 'stop'?"),
        (lambda: af.Weights(transports="shm"), "Weights has no argument 'transports'; did you mean 'transport'?"),
        (lambda: af.Checkpoint(steps=2), "Checkpoint has no argument 'steps'; it takes: every, keep, history"),
        (lambda: af.GRPO(clip_hi=0.3), "GRPO has no argument 'clip_hi'; did you mean 'clip_high'?"),
        (lambda: af.Stage(len, taks="a"), "Stage has no argument 'taks'; did you mean 'task'?"),
        (lambda: af.Workflow(batch_sise=8), "Workflow has no argument 'batch_sise'; did you mean 'batch_size'?"),
        (lambda: af.Workflow(batch_size=8), "Workflow.__init__() missing 4 required keyword-only arguments: 'prompts', 'rollout', 'train', and 'steps'"),
    ],
)  # fmt: skip
def test_a_name_that_there_is_not_is_told_with_the_nearest_one(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError) as raised:
        make()

    assert str(raised.value) == message


def test_a_name_that_another_begins_with_is_the_nearest() -> None:
    assert hint("stops", ["top_p", "top_k", "stops_ids"]) == "did you mean 'stops_ids'?"
    assert hint("max_token", ["max_tokens", "top_k"]) == "did you mean 'max_tokens'?"
    assert hint("colour", ["top_k"]) == ""


def takes(
    rate: float,
    names: list[str],
    device: int | None = None,
    of: Missing = 0,
    folder: Path = Path(),
    **more: int,
) -> None:
    """Of a package whose annotations cannot all be resolved."""


def test_values_are_judged_by_a_functions_annotations_where_these_are_plain() -> None:
    fine = {"rate": 1, "names": ["a"], "device": None, "of": "anything", "folder": "text", "other": 3}
    assert not list(type_errors(takes, fine))
    assert list(type_errors(takes, {"rate": "1e-5", "names": "ab", "device": 0.5})) == [
        ("rate", "must be float, not str: '1e-5'"),
        ("names", "must be a list of str, not str: 'ab'"),
        ("device", "must be int or None, not float: 0.5"),
    ]
