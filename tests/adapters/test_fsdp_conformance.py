"""FSDP keeps to the contract, alone and as two ranks."""

from __future__ import annotations

from asyncflow_fsdp.engine import FsdpEngine
from asyncflow_fsdp.plugin import asyncflow_adapters
from asyncflow_sdk.plugins import import_name
from asyncflow_sdk.testing.kit.conformance import BoundCheck, Conformance

OPTIONS = {"threads": 1, "lr": 1e-3}
one = Conformance("train", FsdpEngine, options=OPTIONS)
two = Conformance("train", FsdpEngine, world_size=2, options=OPTIONS)
parts = Conformance(
    "train", FsdpEngine, world_size=2, only=["logprobs", "row_order", "companions"],
    options={**OPTIONS, "micro_batch_tokens": 64, "packed": True, "checkpointing": True},
)  # fmt: skip


@one.parametrize
def test_one_process_conforms(check: BoundCheck) -> None:
    check()


@two.parametrize
def test_two_processes_conform(check: BoundCheck) -> None:
    check()


@parts.parametrize
def test_two_processes_conform_in_packed_micro_batches(check: BoundCheck) -> None:
    check()


def test_the_plugin_names_the_engine() -> None:
    (spec,) = asyncflow_adapters()

    assert (spec.kind, spec.name) == ("train", "fsdp")
    assert import_name(spec.factory) is FsdpEngine
