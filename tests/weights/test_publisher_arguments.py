"""What a publisher is given: weights, numbers, dtypes, probes and transports; what is none of these is refused at once."""

import re
from collections import ChainMap, OrderedDict
from typing import Any

import numpy as np
import pytest
from replicas import LIMIT_S, PROBE, Served

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, PluginError
from asyncflow_sdk.types import Probe

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("dtype", "message"),
    [("int8", "not 'int8'"), ("bf16", "use 'bfloat16'"), ("bfloat6", "use 'bfloat16'"), (7, "not 7")],
)  # fmt: skip
def test_a_dtype_that_weights_are_not_published_in_is_refused_before_anything_else(
    served: Served, dtype: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        served.trainer(dtype=dtype)
    with pytest.raises(ConfigError, match=message):
        af.Weights(dtype=dtype)
    served.trainer("next", dtype="float8_e4m3fn").close()  # nothing was taken


@pytest.mark.parametrize(
    ("probe", "message"),
    [
        ({"prompt_ids": [[0]]}, "a probe must be an af.Probe.*not dict"),
        (Probe(((0,),), ((1, 2),)), r"responses of \[2\] tokens and log-probs of \[\]"),
        (Probe(((0,), (1,)), ((1, 2), (1,)), ((0.1, 0.2), (0.1, 0.1))), r"responses of \[2, 1\] tokens and log-probs of \[2, 2\]"),
        (Probe(((0,), (1,)), ((1, 2),), ((0.1, 0.2),)), "at least one prompt, and as many responses"),
        (Probe((("a",),), ((1,),), ((0.1,),)), "`int`, got `str` - at `prompt_ids"),  # type: ignore[arg-type]
        (Probe(((0,),), ((1,),), ((0.1,),), float("nan")), "tolerance must be 0 or more, not nan"),
    ],
)  # fmt: skip
def test_a_probe_that_no_engine_can_be_compared_with_is_refused(served: Served, probe: Any, message: str) -> None:
    with served.trainer() as trainer:
        with pytest.raises(ConfigError, match=message):
            trainer.publish(1, [("w", np.ones(3))], probe=probe)
        trainer.publish(1, [("w", np.ones(3))], probe=PROBE).wait(LIMIT_S)  # the number is still to be had


@pytest.mark.parametrize("version", ["1", 1.7, True, -1, None, 1 << 70, np.float32(1)])
def test_the_number_of_a_version_is_a_whole_number(served: Served, version: Any) -> None:
    with served.trainer() as trainer:
        trainer.publish(np.int64(0), {"w": np.ones(3)}).wait(LIMIT_S)  # type: ignore[arg-type]
        for act in (lambda: trainer.publish(version, {"w": np.ones(3)}), lambda: trainer.rollback(version)):
            with pytest.raises(ConfigError, match=rf"an int of 0 or more, not {re.escape(repr(version))}$"):
                act()


class Gathered(dict[str, Any]):
    """Its tensors are made as they are asked for, each in the place of the one before."""

    def items(self) -> Any:
        buffer = np.empty(1 << 17)
        for number, name in enumerate(self):
            buffer[:] = number
            yield name, buffer


@pytest.mark.parametrize("kind", [dict, OrderedDict, ChainMap, Gathered, lambda given: given.items(), list])
def test_weights_may_be_a_mapping_or_pairs_whatever_makes_the_tensors(served: Served, kind: Any) -> None:
    given: Any = (
        Gathered(dict.fromkeys("wxyz")) if kind is Gathered else {n: np.full(9, i) for i, n in enumerate("wxyz")}
    )
    weights = list(given.items()) if kind is list else given if kind is Gathered else kind(given)
    manifest = served.trainer().publish(1, weights).wait(LIMIT_S)
    assert [tensor.name for tensor in manifest.tensors] == list("wxyz")
    with served.newest() as update:
        assert [set(array.tolist()) for _, array in update.arrays()] == [{0}, {1}, {2}, {3}]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (None, "version 1: weights are a mapping of names to tensors.*, not None$"),
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
    with served.trainer() as trainer:
        with pytest.raises(ConfigError, match=message):
            trainer.publish(1, weights)
        trainer.publish(1, {"w": np.ones(3)}).wait(LIMIT_S)


def test_a_probe_may_be_given_in_arrays(served: Served) -> None:
    probe: Any = Probe([np.arange(2)], np.ones((1, 2), np.int64), [np.array([-1.0, -2.0], np.float32)], 1)  # type: ignore[arg-type]
    served.publish(1, probe=probe)
    with served.newest() as update:
        assert update.probe == Probe(((0, 1),), ((1, 1),), ((-1.0, -2.0),), 1.0)


def test_transports_and_options_that_are_not_there_are_refused(served: Served) -> None:
    with pytest.raises(PluginError, match="no transport adapter is named 'nonsense'"):
        served.trainer(transport="nonsense")
    with pytest.raises(ConfigError, match="transport 'shm' has no option 'port'; it has none"):
        served.trainer(port=7)
    with pytest.raises(ConfigError, match="not in sight of this process"):
        served.client("far", shared_memory=False).weight_publisher("shm")
    for rank, size in ((1, 1), (-1, 2)):
        with pytest.raises(ConfigError, match=f"rank {rank} of {size} cannot publish"):
            served.trainer(rank=rank, world_size=size)
    served.trainer().close()  # none of them took the role
