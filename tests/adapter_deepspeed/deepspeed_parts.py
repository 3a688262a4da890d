"""With which options DeepSpeed is made in tests, and engines that look at themselves, or die."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from asyncflow_sdk.types import Shard
from asyncflow_torch.data_parallel import DataParallelEngine


def options(stage: int, **more: Any) -> dict[str, Any]:
    """Of the small models of tests every parameter is parted: DeepSpeed keeps those of less than 100,000 elements whole."""
    config: dict[str, Any] = {"zero_optimization": {"stage3_param_persistence_threshold": 0}} if stage == 3 else {}
    return {"stage": stage, "device": "cpu", "threads": 1, "lr": 1e-3, "config": config} | more


def engine_of(**given: Any) -> Any:
    from asyncflow_deepspeed.engine import DeepSpeedEngine

    return DeepSpeedEngine(**given)


def looking(**given: Any) -> Any:
    """Raises where weights that are given, saved or exported were gathered for it."""
    from asyncflow_deepspeed.engine import DeepSpeedEngine

    class Looking(DeepSpeedEngine):
        def named_weights(self) -> Iterator[tuple[str, Any]]:
            parts = sum(w.ds_tensor.ds_numel * w.element_size() for w in self._engine.module.parameters())
            with _NothingGathered(self._engine) as look:
                nbytes = 0
                for name, given in super().named_weights():
                    tensor = given.tensor if isinstance(given, Shard) else given
                    nbytes += tensor.numel() * tensor.element_size()
                    assert tensor.untyped_storage().data_ptr() in look.own, f"{name} is a copy"
                    yield name, given
                assert nbytes <= parts, f"{nbytes} bytes are given, of a part of {parts}"

        def save(self, path: Path) -> None:
            with _NothingGathered(self._engine):
                super().save(path)

        def export(self, path: Path) -> None:
            with _NothingGathered(self._engine):
                super().export(path)

    return Looking(**given)


class _NothingGathered:
    """While it lasts no parameter becomes whole, and no tensor of weights goes between ranks: words of up to a kilobyte do."""

    def __init__(self, engine: Any) -> None:
        self._weights = list(engine.module.parameters())
        self.own = {weight.ds_tensor.untyped_storage().data_ptr() for weight in self._weights}

    def __enter__(self) -> _NothingGathered:
        from deepspeed.comm import comm

        # DeepSpeed keeps the function that it gathers parameters by
        places = [
            (comm.cdb, "all_gather_function"),
            *((dist, name) for name in ("all_gather", "all_reduce", "broadcast")),
        ]
        self._usual = [(place, name, getattr(place, name)) for place, name in places]
        for place, name, usual in self._usual:
            setattr(place, name, self._looked_at(name, usual))
        return self

    def __exit__(self, *exc: object) -> None:
        for place, name, usual in self._usual:
            setattr(place, name, usual)

    def _looked_at(self, name: str, usual: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            flat = [each for one in (*given, *named.values()) for each in (one if isinstance(one, list) else [one])]
            sizes = [each.numel() * each.element_size() for each in flat if isinstance(each, torch.Tensor)]
            assert max(sizes) <= 1024, f"{name} of {max(sizes)} bytes"
            return usual(*given, **named)

        return call


def dying(**given: Any) -> Any:
    """Rank 1 is killed in its second step."""
    made: DataParallelEngine = engine_of(**given)
    step, count = made.backward, 0

    def backward(loss: Any, *, last: bool) -> None:
        nonlocal count
        count += 1
        if count == 2 and os.environ["RANK"] == "1":
            os._exit(9)
        step(loss, last=last)

    made.backward = backward  # type: ignore[method-assign]
    return made


def failing_once(**given: Any) -> Any:
    """Its algorithm raises in the second pass of its first step, where there is one."""
    made: Any = engine_of(**given)
    usual, passes = made._algorithm.loss, 0

    class Fails:
        def __getattr__(self, name: str) -> Any:
            return getattr(usual.__self__, name)

        def loss(self, tokens: Any) -> Any:
            nonlocal passes
            passes += 1
            if passes == 2:
                raise ArithmeticError("told to fail")
            return usual(tokens)

    made._algorithm = Fails()
    return made


def not_finite(**given: Any) -> Any:
    """The gradient of its first step is infinite."""
    made: Any = engine_of(**given)
    made.backward = _infinite_first(made.backward)
    return made


def with_critic(*, infinite: str = "", **given: Any) -> Any:
    """In its first step the gradient is infinite of "policy" or "critic", and that of the other is not."""
    made: Any = engine_of(**given)
    if infinite == "critic":
        made._values.trained.backward = _infinite_first(made._values.trained.backward)
    if infinite == "policy":
        made._policy.backward = _infinite_first(made._policy.backward)
        usual, count = made._values.backward, 0

        def backward(values: Any, gradient: Any, *, last: bool) -> None:
            nonlocal count
            count += 1
            usual(values, torch.ones_like(gradient) if count == 1 else gradient, last=last)

        made._values.backward = backward
    return made


def _infinite_first(usual: Any) -> Any:
    count = 0

    def backward(loss: Any, *, last: bool) -> None:
        nonlocal count
        count += 1
        usual(loss * float("inf") if count == 1 else loss, last=last)

    return backward


def held(*, gates: str, **given: Any) -> Any:
    """Of which a rank may wait in a backward pass."""
    from rank_runs import hold

    made = engine_of(**given)
    hold(made, gates)
    return made
