"""An engine from outside gives further columns, and takes a sampling parameter of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from echo_runs import PROMPTS, echo_workflow
from plugin_packages import install_plugin
from test_producers import produce

import asyncflow_sdk as af
from asyncflow_sdk.testing import Conformance, EchoRollout
from asyncflow_sdk.types import ColumnSpec
from asyncflow_sdk.workflow.loops.engine_gateway import EngineGateway

PLUGIN = '''
import asyncflow_sdk as af
from asyncflow_sdk.testing import EchoRollout
from asyncflow_sdk.types import ColumnSpec
from dataclasses import replace

@af.hookimpl
def asyncflow_adapters():
    can = {"gives": ["entropy"], "extra": ["scale"]}
    return [af.AdapterSpec(kind="rollout", name="entropic", factory="entropic:Entropic", can=can)]

class Entropic(EchoRollout):
    """The entropy of a token is ``scale`` times its number. ``forgets``: a continued response begins anew."""

    gives = {"entropy": ColumnSpec("ragged", "float16")}

    def __init__(self, model="", *, forgets=False, partial=False, token_s=0.0):
        super().__init__(model, partial=partial, token_s=token_s)
        self.capabilities = replace(self.capabilities, extra=("scale",))
        self.forgets = forgets

    async def generate(self, request):
        scale = request.sampling.extra.get("scale", 1)
        async for got in super().generate(request):
            entropy = got.token_ids * float(scale)
            yield replace(got, columns={"entropy": [0.0] * self.forgets * request.drawn + list(entropy)})
'''


@pytest.fixture
def entropic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Any]:
    """The options of a rollout with the engine of a plugin in its own package."""
    install_plugin(tmp_path, monkeypatch, "entropic", PLUGIN)
    return {"engine": "entropic", "group_size": 4, "prompt": "prompt_ids", "launcher": "thread"}


def by_entropy(entropy: af.Ragged) -> list[float]:
    return [float(row.sum()) for row in entropy]


def sums(response_ids: af.Ragged, entropy: af.Ragged) -> list[float]:
    """A reward that takes the column."""
    assert entropy.values.dtype == np.float16
    assert np.array_equal(entropy.offsets, response_ids.offsets)
    assert np.array_equal(entropy.values, response_ids.values * 2.0)
    return [float(row.sum()) for row in entropy]


def test_a_stage_and_the_trainer_take_the_column_of_an_engine_from_outside(
    entropic: Mapping[str, Any], tmp_path: Path
) -> None:
    rollout = af.Rollout(**entropic, sampling=af.Sampling(extra={"scale": 2}), partial=True, token_s=0.001)
    train = af.Train("echo", launcher="thread", needs=["entropy"])
    reward = af.Stage(sums, task="reward", launcher="thread")
    result = echo_workflow(rollout=rollout, train=train, reward=reward).run(tmp_path / "run")

    assert result.summary["balanced"]
    assert result.rewards[0] == np.mean([2 * sum(row) for row in PROMPTS["prompt_ids"].tolist()])


def test_other_parameters_and_undeclared_columns_are_refused_at_start(
    entropic: Mapping[str, Any], tmp_path: Path
) -> None:
    odd = af.Sampling(extra={"scale": 2, "skale": 1})
    with pytest.raises(af.ConfigError, match=r"engine 'entropic' takes no parameter 'skale' .* It takes: scale"):
        echo_workflow(rollout=af.Rollout(**entropic, sampling=odd))
    with pytest.raises(af.ConfigError, match=r"engine 'echo' takes no parameter 'scale' .* It takes: none"):
        echo_workflow(evaluate=af.Evaluation(
            prompts=PROMPTS, every=1, reward=sums, sampling=af.Sampling(extra={"scale": 2})
        ))  # fmt: skip
    by_path = af.Rollout(**{**entropic, "engine": "entropic:Entropic", "max_restarts": 0})
    with pytest.raises(af.WorkerFailed, match=r"gives columns \['entropy'\], and its adapter declares \[\]"):
        echo_workflow(rollout=by_path).run(tmp_path / "run")


def test_an_evaluation_by_an_engine_of_its_own_draws_by_its_own_parameters(
    entropic: Mapping[str, Any], tmp_path: Path
) -> None:
    given = {"scale": 2}
    sampling = af.Sampling(extra=given)
    evaluation = af.Evaluation(
        prompts=PROMPTS, every=1, reward=by_entropy, rollout=af.Rollout(**entropic), sampling=sampling
    )
    result = echo_workflow(evaluate=evaluation).run(tmp_path / "run")
    sampling.extra.clear()

    assert result.evaluations
    assert given == {"scale": 2}


def test_the_kit_checks_columns_whole_and_interrupted(entropic: Mapping[str, Any]) -> None:
    for forgets, outcome in ((False, "passed"), (True, "failed")):
        options = {"partial": True, "token_s": 0.001, "forgets": forgets}
        (found,) = Conformance("rollout", "entropic", options=options, only=["further_columns"]).run().results
        assert (found.outcome, "gave column 'entropy' of shape" in found.detail) == (outcome, forgets), found.detail


# ---- cut and joined


class Counted(EchoRollout):
    """Each token keeps as many numbers as its position in the response counts, from 0: (position, number)."""

    gives: Mapping[str, ColumnSpec] = {
        "kept": ColumnSpec("ragged", "int32", (2,)), "kept_counts": ColumnSpec("ragged", "int8"),
        "length": ColumnSpec("fixed", "int64"),
    }  # fmt: skip

    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        async for got in super().generate(request):
            positions = np.arange(request.drawn, request.drawn + len(got.token_ids))
            kept = [(position, number) for position in positions.tolist() for number in range(position)]
            counted = {"kept": np.array(kept).reshape(-1, 2), "kept_counts": positions}
            yield replace(got, columns={**counted, "length": request.drawn + len(got.token_ids)})


def declare(run: af.Run, *more: str) -> None:
    gives = ["response_ids", "logprobs", "version_spans", "finish_reason", *Counted.gives, *more]
    run.queue.declare("rollout", needs=["prompt_ids"], gives=gives, max_attempts=1)
    run.queue.declare("sink", needs=gives)


async def answer(gateway: EngineGateway, request: af.Request) -> af.Completion:
    ((got,),) = [list(each.completion.each()) async for each in gateway.generate(request)]
    return got


def counted(tokens: int) -> list[list[int]]:
    return [[position, number] for position in range(tokens) for number in range(position)]


@pytest.mark.fast
@pytest.mark.parametrize("stop", ["", "f"])
def test_counted_columns_are_joined_and_cut_with_their_tokens(stop: str) -> None:
    # given an engine that is interrupted in the middle of a response
    prompt, seen = np.arange(9, dtype=np.int32), asyncio.Event()

    class Interrupted(Counted):
        async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
            async for got in super().generate(request):
                tokens = len(got.token_ids)
                if request.drawn < 4:
                    seen.set()
                    await self.interrupted.wait()
                    tokens = 2
                    cut = EngineGateway(self, 0, asyncio.Event()).columns.cut(got, tokens)
                    got = replace(cut, finish_reason="aborted", columns={**cut.columns, "length": -1})
                yield got

        async def interrupt(self) -> None:
            self.interrupted.set()

        def __init__(self) -> None:
            super().__init__(partial=True)
            self.interrupted = asyncio.Event()

    async def run() -> af.Completion:
        engine = Interrupted()
        gateway = EngineGateway(engine, 0, asyncio.Event())
        sampling = af.Sampling(max_tokens=8, stop=stop or ())
        request = af.Request(prompt, sampling, decode=lambda ids: "".join(chr(97 + i) for i in ids))
        answering = asyncio.create_task(answer(gateway, request))
        for version in (1, 2):
            await seen.wait()
            async with gateway.stopped(interrupt=True):
                seen.clear()
                engine.interrupted = asyncio.Event()
                gateway.take(version)
        return await answering

    # when
    got = asyncio.run(run())

    # then
    tokens = 6 if stop else 8
    assert np.asarray(got.token_ids).tolist() == list(range(tokens))
    assert [tuple(span) for span in got.spans] == [(0, 0, 2), (1, 2, 4), (2, 4, tokens)]
    assert got.columns["kept"].tolist() == counted(tokens)
    assert got.columns["kept_counts"].tolist() == list(range(tokens))
    assert got.columns["kept_counts"].dtype == np.int8
    assert int(got.columns["length"]) == 8


@pytest.mark.fast
def test_observed_tokens_of_an_agent_have_blank_columns() -> None:
    async def talk(turns: af.Turns) -> None:
        await turns.generate(max_tokens=2)
        turns.observe([7, 8])
        await turns.generate(max_tokens=1)

    with af.serve() as run:
        declare(run, "loss_mask")
        run.queue.put({"prompt_ids": af.Ragged.of([[1, 2, 3]])})
        run.queue.end()
        produce(run, Counted(), agent=talk)
        assert run.queue.failed() == ()
        with run.queue.get("sink", 1, timeout_s=30) as batch:
            assert batch.ragged("kept_counts").tolist() == [[0, 1, 0, 0, 0]]
            assert batch.ragged("kept").tolist() == [[[1, 0]]]
            assert batch.array("length").tolist() == [1]
            batch.ack()


@pytest.mark.fast
@pytest.mark.parametrize(
    ("packed", "columns", "message"),
    [
        (False, {"kept_counts": [1]}, r"Wrong gave column 'kept_counts' of shape \[1\] for response 0, not \[2\]: the response has 2"),
        (False, {"kept": [[1, 1]]}, r"column 'kept' of shape \[1, 2\] for response 0, not \[3, 2\]: the sum of its column 'kept_counts'"),
        (False, {"kept_counts": [-1, 4]}, "column 'kept_counts' with counts below 0 for response 0"),
        (False, {"length": 0.5}, "column 'length' as float64 for response 0, and declares int64"),
        (False, {"kept_counts": [300, 2]}, "'kept_counts' for response 0 with values that int8 cannot hold"),
        (False, {"kept": [[1, 2], [3]]}, r"column 'kept' as list \(.*\) for response 0, and declares int32"),
        (False, {"more": 1}, r"Wrong gave columns .* 'more' is in one of them only"),
        (True, {"kept_counts": af.Ragged.of([[1, 2, 0]])}, "'kept_counts' of shape"),
        (True, {"length": np.array(2)}, "packed responses that cannot be taken apart"),
        (True, {"length": np.arange(2)}, "different numbers of rows: 1 of index, .* 2 of length"),
    ],
)  # fmt: skip
def test_columns_that_do_not_fit_are_refused(packed: bool, columns: dict[str, Any], message: str) -> None:
    class Wrong(Counted):
        async def generate(self, request: af.Request) -> AsyncIterator[af.Completion | af.Completions]:
            given = {"kept": np.zeros((3, 2), int), "kept_counts": [1, 2], "length": 2, **columns}
            if not packed:
                yield af.Completion(0, [1, 2], [0.0, 0.0], columns=given)
                return
            rows = {
                name: each if isinstance(each, (af.Ragged, np.ndarray)) else np.array([each])
                for name, each in given.items()
            }
            rows["kept"] = af.Ragged.of([np.zeros((3, 2), np.int32)])
            ids = af.Ragged.of([np.array([1, 2], np.int32)])
            logprobs = af.Ragged(np.zeros(2, np.float32), ids.offsets)
            yield af.Completions(np.arange(1), ids, logprobs, ["stop"], columns=rows)  # fmt: skip

    with af.serve() as run:
        declare(run)
        run.queue.put({"prompt_ids": af.Ragged.of([[1]])})
        run.queue.end()
        produce(run, Wrong())
        (letter,) = run.queue.failed()
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(letter.reasons[-1])


@pytest.mark.fast
def test_packed_columns_are_written_as_they_are() -> None:
    class Packs(Counted):
        async def generate(self, request: af.Request) -> AsyncIterator[af.Completion | af.Completions]:
            ids = af.Ragged.of([[1], [2, 3]], np.int32)
            columns = {
                "kept": af.Ragged.from_lengths(np.arange(10, dtype=np.int32).reshape(5, 2), np.array([2, 3])),
                "kept_counts": af.Ragged(np.array([2, 0, 3], np.int8), ids.offsets), "length": np.array([7, 8]),
            }  # fmt: skip
            logprobs = af.Ragged(np.zeros(3, np.float32), ids.offsets)
            yield af.Completions(np.arange(2), ids, logprobs, ["stop", "stop"], columns=columns)

    with af.serve() as run:
        declare(run)
        run.queue.put({"prompt_ids": af.Ragged.of([[1]])}, group_size=2)
        run.queue.end()
        produce(run, Packs())
        with run.queue.get("sink", 2, at_least=2, timeout_s=30) as batch:
            assert batch.ragged("kept").tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7], [8, 9]]]
            assert batch.ragged("kept_counts").tolist() == [[2], [0, 3]]
            assert batch.array("length").tolist() == [7, 8]
            batch.ack()
