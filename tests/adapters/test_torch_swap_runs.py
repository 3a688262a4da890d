"""Whole runs of the torch engines, with versions loaded while requests run or between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_runs import check_version_folders
from safetensors.torch import load_file

import asyncflow_sdk as af
from asyncflow_sdk.errors import WeightMismatch
from asyncflow_sdk.plugins import registry
from asyncflow_sdk.types import VERSION_SPANS, token_staleness, token_versions
from asyncflow_sdk.types.events import Loaded, WeightState

TransformersEngine: Any = registry().get("rollout", "transformers").load()
TorchEngine: Any = registry().get("train", "torch").load()

STEPS, GROUP = 6, 4
LIMIT_S = 60


def _odd(response_ids: af.Ragged) -> list[float]:
    """More for responses of more odd tokens: any two differ, so that every step trains."""
    return [float((np.asarray(ids) % 2).mean()) for ids in response_ids]


def _workflow(folder: str, weights: af.Weights, **options: Any) -> af.Workflow:
    rng = np.random.default_rng(0)
    return af.Workflow(
        prompts={"prompt_ids": af.Ragged.of([rng.integers(3, 43, n).astype(np.int32) for n in (3, 9, 5, 14)])},
        rollout=af.Rollout(
            "transformers",
            model=folder,
            group_size=GROUP,
            prompt="prompt_ids",
            sampling=af.Sampling(max_tokens=60),
            max_rows=24,
            launcher="thread",
            **options,
        ),
        reward=_odd,
        train=af.Train("torch", model=folder, learning_rate=1e-2, launcher="thread"),
        batch_size=2 * GROUP,
        steps=STEPS,
        staleness=af.Staleness(max_staleness=2),
        weights=weights,
    )


def test_a_run_swaps_in_flight_and_every_token_is_what_its_version_gives(endless: str, tmp_path: Path) -> None:
    # given every version kept in files
    weights = af.Weights(
        transport="file",
        swap="in_flight",
        keep=STEPS + 2,
        verify=["held"],
        options={"path": str(tmp_path / "versions")},
    )

    # when
    result = _workflow(endless, weights).run(tmp_path / "run")

    # then all rows were trained, and none of their tokens was too old for its step
    assert result.summary["balanced"]
    rows = result.summary["rows"]  # one whose reward is exactly the mean of its group teaches nothing: filtered
    assert rows["consumed"] + rows["filtered"] == STEPS * 2 * GROUP
    steps = dict(af.read_steps(tmp_path / "run"))
    versions: set[int] = set()
    switched = 0
    for step, batch in steps.items():
        late = token_staleness(batch.ragged(VERSION_SPANS), step)
        assert 0 <= late.min() <= late.max() <= 2
        spans = batch.ragged(VERSION_SPANS)
        assert token_versions(spans).lengths.tolist() == batch.ragged("response_ids").lengths.tolist()
        switched += int((spans.lengths > 1).sum())
        versions |= set(spans.values[:, 0].tolist())
    assert switched
    assert len(versions) > 2

    # and each token's log-prob is that of the version its span names, given all before it
    trainer = TorchEngine(endless)
    for version in versions:
        files = (tmp_path / "versions" / f"version-{version:08}").glob("*.safetensors")
        loaded = {name: tensor for file in files for name, tensor in load_file(file).items()}
        with torch.no_grad():
            for name, tensor in trainer.named_weights():
                tensor.copy_(loaded[name])
        for batch in steps.values():
            of = token_versions(batch.ragged(VERSION_SPANS)).values == version
            wanted = trainer.logprobs(batch).values
            np.testing.assert_allclose(batch.ragged("logprobs").values[of], wanted[of], atol=1e-4)
    check_version_folders(tmp_path / "versions", endless, tmp_path / "run" / "model")


def test_every_version_is_proven_where_requests_end_first(endless: str, tmp_path: Path) -> None:
    events: list[Any] = []
    probe = af.Probe(((1, 5, 6), (7, 8)), ((9, 10, 11), (12, 13, 14, 15)))

    weights = af.Weights(swap="boundary", verify=["probe", "held"], probe=probe)
    result = _workflow(endless, weights).run(tmp_path / "run", on_event=events.append)

    assert (result.summary["balanced"], result.summary["steps"]) == (True, STEPS)
    assert not [e for e in events if isinstance(e, WeightState) and e.state == "failed"]
    assert max(e.version for e in events if isinstance(e, Loaded)) >= STEPS - 3  # else the last step were too stale
    late = af.staleness_of(tmp_path / "run").values
    assert 0 <= late.min() <= late.max() <= 2


@pytest.mark.parametrize("folder", ["tiny", "tied"])
def test_float32_masters_are_published_and_held_in_bfloat16(
    folder: str, request: Any, rollout: Callable[..., Any], trainer: Any, batch: Any
) -> None:
    # given a trainer in float32 and an engine in bfloat16
    path = request.getfixturevalue(folder)
    train, engine = trainer(path, learning_rate=0.01), rollout(path, dtype="bfloat16")

    with af.serve() as run, run.weight_publisher("shm", dtype="bfloat16") as publisher:
        updates = run.weight_updates(timeout_s=LIMIT_S)
        for version in range(3):
            # when it has trained, and published what it has
            train.train_step(batch)
            publisher.publish(version, train.named_weights())
            with next(iter(updates)) as update:
                assert asyncio.run(engine.load_weights(update)) == set(update.tensors)

            # then what is held is that, rounded, and the trainer has what it had
            held = dict(engine.held_weights())
            weights = dict(train.named_weights())
            assert held.keys() == weights.keys()
            for name, tensor in weights.items():
                assert tensor.dtype == torch.float32
                assert torch.equal(held[name], tensor.to(torch.bfloat16))

        # and an engine in float32 refuses it by name, keeping what it has
        other = rollout(path)
        before = {name: tensor.clone() for name, tensor in other.held_weights()}
        publisher.publish(3, train.named_weights())
        with pytest.raises(
            WeightMismatch, match=r"norm\.weight: the version has bfloat16\[64\], the model float32\[64\]"
        ):
            with next(iter(updates)) as update:
                asyncio.run(other.load_weights(update))
        assert all(torch.equal(tensor, before[name]) for name, tensor in other.held_weights())


class Breaking(TransformersEngine):  # type: ignore[misc]
    """Its first load of version 1 breaks off half-way, between the pass at the gate and the next one."""

    gate: Any = None

    async def load_weights(self, update: Any) -> set[str]:
        if update.version != 1 or self.gate is None:
            return await super().load_weights(update)
        gate, self.gate = self.gate, None
        loading = asyncio.ensure_future(super().load_weights(_Half(update)))
        await asyncio.sleep(0)
        gate.go_on()
        return await loading


class _Half:
    """An update that is cut off."""

    def __init__(self, update: Any) -> None:
        self.version, self.tensors, self._update = update.version, update.tensors, update

    def __iter__(self) -> Any:
        for number, item in enumerate(self._update):
            if number == 5:
                raise OSError("the link went down")
            yield item


def test_a_load_that_breaks_off_in_flight_costs_no_row_and_no_blame(
    endless: str, trainer: Any, batch: Any, passes: Any
) -> None:
    # given twelve groups that run when the load of version 1 breaks off
    engine = Breaking(endless, max_rows=64)
    engine.gate = gate = passes(of=(48, 1))
    train = trainer(endless, learning_rate=0.01)
    events: list[Any] = []
    with af.serve(max_staleness=4, steps=3, on_event=events.append) as run:
        run.queue.declare(
            "rollout", needs=["prompt_ids"], gives=["response_ids", "logprobs", "version_spans"], admits=True
        )
        run.queue.declare("train", needs=["response_ids", "logprobs", "version_spans"], batch_rows=16)
        with run.weight_publisher() as publisher, af.connect(run.address, name="replica") as replica:
            publisher.publish(0, train.named_weights()).wait()
            prompts = [np.arange(3, 6 + i, dtype=np.int32) for i in range(12)]
            run.queue.put({"prompt_ids": af.Ragged.of(prompts)}, group_size=4)
            run.queue.end()
            train.train_step(batch)

            async def scenario() -> None:
                producer = af.EngineProducer(
                    replica.queue, engine, sampling=af.Sampling(max_tokens=60), swap="in_flight", verify=["held"]
                )
                running = asyncio.ensure_future(producer.run())
                await gate.reached()
                # when
                publisher.publish(1, train.named_weights())
                await running

            asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))

        # then every row was generated in the end, and no prompt was held to be at fault
        assert run.queue.status().step == 3
    assert not [e for e in events if getattr(e, "level", "") == "warning" and "refused" in e.text]
