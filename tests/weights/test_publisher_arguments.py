"""What a publisher is given: weights, numbers, dtypes, probes and transports; what is none of these is refused at once."""

import re
from collections import ChainMap, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from publisher_runs import LIMIT_S, PROBE, Served

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, PluginError
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.queue._once import drive
from asyncflow_sdk.types import Probe
from asyncflow_sdk.weights import Staged, WeightPublisher
from asyncflow_sdk.weights.arguments import lasts


@pytest.mark.parametrize(
    ("dtype", "message"),
    [("int8", "not 'int8'"), ("bf16", "say 'bfloat16'"), ("bfloat6", "say 'bfloat16'"), (torch.float16, "say 'float16'"), (7, "not 7")],
)  # fmt: skip
def test_a_dtype_that_weights_are_not_published_in_is_refused_before_anything_else(
    served: Served, dtype: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        WeightPublisher(served.client(), dtype=dtype)
    with pytest.raises(ConfigError, match=message):
        af.Weights(dtype=dtype)
    WeightPublisher(served.client("next"), dtype="float8_e4m3fn").close()  # nothing was taken


@pytest.mark.parametrize(
    ("probe", "message"),
    [
        ({"prompt_ids": [[0]]}, "a probe is an af.Probe.*not dict"),
        (Probe(((0,),), ((1, 2),)), r"responses of \[2\] tokens and log-probs of \[\]"),
        (Probe(((0,), (1,)), ((1, 2), (1,)), ((0.1, 0.2), (0.1, 0.1))), r"responses of \[2, 1\] tokens and log-probs of \[2, 2\]"),
        (Probe(((0,), (1,)), ((1, 2),), ((0.1, 0.2),)), "as many prompts as responses"),
        (Probe((("a",),), ((1,),), ((0.1,),)), "`int`, got `str` - at `prompt_ids"),  # type: ignore[arg-type]
        (Probe(((0,),), ((1,),), ((0.1,),), float("nan")), "tolerance is 0 or more, not nan"),
    ],
)  # fmt: skip
def test_a_probe_that_no_engine_can_be_compared_with_is_refused(served: Served, probe: Any, message: str) -> None:
    with WeightPublisher(served.client()) as trainer:
        with pytest.raises(ConfigError, match=message):
            trainer.publish(1, [("w", np.ones(3))], probe=probe)
        trainer.publish(1, [("w", np.ones(3))], probe=PROBE).wait(LIMIT_S)  # the number is still to be had


@pytest.mark.parametrize("version", ["1", 1.7, True, -1, None, 1 << 70, np.float32(1)])
def test_the_number_of_a_version_is_a_whole_number(served: Served, version: Any) -> None:
    with WeightPublisher(served.client()) as trainer:
        trainer.publish(np.int64(0), {"w": np.ones(3)}).wait(LIMIT_S)  # type: ignore[arg-type]
        for act in (lambda: trainer.publish(version, {"w": np.ones(3)}), lambda: trainer.rollback(version)):
            with pytest.raises(ConfigError, match=rf"an int of 0 or more, not {re.escape(repr(version))}$"):
                act()


def test_tensors_are_taken_for_lasting_only_where_nothing_makes_them_as_they_are_asked_for() -> None:
    class Gathered(dict[str, Any]):
        def items(self) -> Any:
            return ((name, np.ones(3)) for name in self)

    plain = {"w": np.ones(3)}
    assert all(
        lasts(each)
        for each in (plain, OrderedDict(plain), plain.items(), [("w", 1)], torch.nn.Linear(1, 1).state_dict())
    )
    assert not any(
        lasts(each)
        for each in (Gathered(plain), iter(plain.items()), (pair for pair in plain.items()), ChainMap(plain))
    )


def test_weights_may_be_a_mapping(served: Served) -> None:
    with WeightPublisher(served.client()) as trainer:
        manifest = trainer.publish(1, torch.nn.Linear(2, 3).state_dict()).wait(LIMIT_S)
        assert [tensor.name for tensor in manifest.tensors] == ["weight", "bias"]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (None, "version 1: weights are a mapping of names to tensors.*, not None$"),
        (torch.nn.Linear(2, 3), "not a Linear$"),
        (lambda: [("w", np.ones(3))], "not a function$"),
        ("w", "not 'w'$"),
        ([("w", np.ones(3)), ("b", np.ones(3), 1)], "item 1 is a tuple of 3$"),
        (["ab"], "item 0 is 'ab'$"),
        ([np.ones(2)], "item 0 is a ndarray$"),
        (7, "not a int$"),
    ],
)
def test_weights_of_another_shape_are_refused_and_leave_the_number_free(
    served: Served, weights: Any, message: str
) -> None:
    with WeightPublisher(served.client()) as trainer:
        with pytest.raises(ConfigError, match=message):
            trainer.publish(1, weights)
        trainer.publish(1, {"w": np.ones(3)}).wait(LIMIT_S)


def test_a_probe_may_be_given_in_arrays(served: Served) -> None:
    probe: Any = Probe([np.arange(2)], torch.ones(1, 2, dtype=torch.int64), [np.array([-1.0, -2.0], np.float32)], 1)  # type: ignore[arg-type]
    with WeightPublisher(served.client()) as trainer:
        trainer.publish(1, [("w", np.ones(3))], probe=probe).wait(LIMIT_S)
        told = drive(served.client("replica")._port.send(cmd.AwaitVersion(after=-1)))
        assert Staged(told, [], None).probe == Probe(((0, 1),), ((1, 1),), ((-1.0, -2.0),), 1.0)


def test_transports_and_options_that_are_not_there_are_refused(served: Served) -> None:
    with pytest.raises(PluginError, match="no transport adapter is named 'nonsense'"):
        WeightPublisher(served.client(), "nonsense")
    with pytest.raises(ConfigError, match="transport 'shm' has no option 'port'; it has none"):
        WeightPublisher(served.client(), port=7)
    with pytest.raises(ConfigError, match="not in sight of this process"):
        WeightPublisher(served.client(shared_memory=False), "shm")
    for rank, size in ((1, 1), (-1, 2)):
        with pytest.raises(ConfigError, match=f"rank {rank} of {size} cannot publish"):
            WeightPublisher(served.client(), rank=rank, world_size=size)
    WeightPublisher(served.client()).close()  # none of them took the role
