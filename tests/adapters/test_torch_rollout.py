"""TransformersEngine: what it generates, how requests share it, and how it refuses and fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncflow_sdk.errors import ConfigError, EngineError
from asyncflow_sdk.interfaces import Request
from asyncflow_sdk.types import Batch, Sampling
from asyncflow_torch import decode_thread
from asyncflow_torch.rollout import TransformersEngine

Make = Callable[..., TransformersEngine]
LIMIT_S = 30


def test_greedy_equals_transformers_own_generate(
    tiny: str, rollout: Make, generate: Any, prompts: list[np.ndarray]
) -> None:
    # given prompts of different lengths, read and decoded together
    requests = [Request(p, Sampling(temperature=0, max_tokens=20)) for p in prompts]

    # when
    groups = generate(rollout(tiny), requests)

    # then each is what transformers gives for it alone, the end token included
    model = AutoModelForCausalLM.from_pretrained(tiny).eval()
    for prompt, (completion,) in zip(prompts, groups, strict=True):
        ids = torch.tensor(prompt[None], dtype=torch.int64)
        wanted = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20)
        assert completion.token_ids.tolist() == wanted[0, len(prompt) :].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_equal_the_train_engines(
    tiny: str, rollout: Make, generate: Any, trainer: Any, prompts: list[np.ndarray], temperature: float
) -> None:
    # given responses of many lengths, some drawn with the tail cut off
    cuts: list[dict[str, Any]] = [{}, {"top_k": 5}, {"top_p": 0.8}] * 2
    requests = [
        Request(p, Sampling(max_tokens=12, temperature=temperature, **cut), n=5, seed=i)
        for i, (p, cut) in enumerate(zip(prompts, cuts, strict=True))
    ]
    groups = generate(rollout(tiny), requests)
    rows = [(p, c) for p, group in zip(prompts, groups, strict=True) for c in group]
    assert len({len(c.token_ids) for _, c in rows}) > 3
    batch = Batch.of({"prompt_ids": [p for p, _ in rows], "response_ids": [c.token_ids for _, c in rows]})

    # when
    again = trainer(temperature=temperature, micro_batch_tokens=100).logprobs(batch)

    # then
    np.testing.assert_allclose(again.values, np.concatenate([c.logprobs for _, c in rows]), atol=1e-4)
    assert again.lengths.tolist() == [len(c.token_ids) for _, c in rows]


def test_completions_say_which_they_are_and_why_they_ended(tiny: str, rollout: Make, generate: Any) -> None:
    # given enough rows that some draw the end token and some reach the limit
    ((*group,),) = generate(
        rollout(tiny), [Request(np.array([5, 6], np.int32), Sampling(max_tokens=6), n=64, seed=0)]
    )

    # then
    assert [c.index for c in group] == list(range(64))
    assert {c.finish_reason for c in group} == {"stop", "length"}
    for c in group:
        ended = c.token_ids[-1] == 2
        assert c.finish_reason == ("stop" if ended else "length")
        assert 2 not in c.token_ids[:-1]
        assert len(c.token_ids) == len(c.logprobs) <= 6
        assert ended or len(c.token_ids) == 6
        assert (c.token_ids.dtype, c.logprobs.dtype) == (np.int32, np.float32)


@pytest.mark.parametrize(("together_s", "parts"), [(3600.0, 1), (-1.0, 4)])
def test_rows_of_a_request_that_end_one_after_another_come_together_if_it_is_soon(
    tiny: str, rollout: Make, monkeypatch: pytest.MonkeyPatch, together_s: float, parts: int
) -> None:
    # given
    monkeypatch.setattr(decode_thread, "TOGETHER_S", together_s)
    engine, came = rollout(tiny), []

    # when some rows end with each of four tokens
    async def run() -> None:
        request = Request(np.array([5, 6], np.int32), Sampling(max_tokens=6), n=64, seed=0)
        came.extend([list(completed.each()) async for completed in engine.generate(request)])

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))

    # then all come once, whole, in as many parts as were to be waited for
    group = sorted((each for part in came for each in part), key=lambda completion: completion.index)
    assert [completion.index for completion in group] == list(range(64))
    assert len({len(completion.token_ids) for completion in group}) == 4
    assert all(len(c.token_ids) == 6 or c.token_ids[-1] == 2 for c in group)
    assert len(came) == parts


def test_a_seeded_request_repeats_its_tokens_in_any_company(
    tiny: str, rollout: Make, generate: Any, prompts: list[np.ndarray]
) -> None:
    # given one request alone
    engine = rollout(tiny)
    request = Request(prompts[0], Sampling(max_tokens=10), n=3, seed=77)
    ((*alone,),) = generate(engine, [request])

    # when it runs with prompts of other lengths, with unseeded ones, and with its own seed given otherwise
    others = [Request(p, Sampling(max_tokens=15, top_k=3), n=4) for p in prompts]
    twin = Request(prompts[0], Sampling(max_tokens=10, seed=77), n=3)
    together = generate(engine, [*others[:3], request, twin, *others[3:]])

    # then
    wanted = [c.token_ids.tolist() for c in alone]
    assert [c.token_ids.tolist() for c in together[3]] == wanted
    assert [c.token_ids.tolist() for c in together[4]] == wanted
    assert len({tuple(ids) for ids in wanted}) > 1


def test_more_rows_than_fit_wait_their_turn(tiny: str, rollout: Make, generate: Any) -> None:
    # given room for 8 rows and 10 requests of 3
    engine = rollout(tiny, max_rows=8)
    most = 0
    model = engine._model
    model.lm_head.register_forward_hook(lambda _l, _i, out: _note(out.shape[0]))

    def _note(rows: int) -> None:
        nonlocal most
        most = max(most, rows)

    # when
    groups = generate(engine, [Request(np.array([5 + i]), Sampling(max_tokens=5), n=3) for i in range(10)])

    # then all are served, and never more than fit at once
    assert [len(group) for group in groups] == [3] * 10
    assert 3 < most <= 8


def test_a_late_request_is_served_while_an_earlier_one_runs(endless: str, rollout: Make, busy: Any) -> None:
    engine = rollout(endless)
    long = Request(np.array([5, 6, 7], np.int32), Sampling(max_tokens=120))
    short = Request(np.array([8], np.int32), Sampling(max_tokens=2))

    async def scenario() -> list[str]:
        ended: list[str] = []

        async def run(name: str, request: Request) -> None:
            ended.extend([name async for _ in engine.generate(request)])

        # given a request that has begun
        first = asyncio.create_task(run("long", long))
        await busy(engine)
        # when another comes
        await asyncio.gather(first, run("short", short))
        return ended

    # then it ends first
    assert asyncio.run(asyncio.wait_for(scenario(), LIMIT_S)) == ["short", "long"]


def test_cancelling_one_generation_aborts_its_rows_and_no_others(endless: str, rollout: Make, busy: Any) -> None:
    engine = rollout(endless, max_rows=4)

    async def scenario() -> int:
        # given two running requests that fill the engine, one to be cancelled, and one that waits for room
        async def count(n: int, tokens: int) -> int:
            request = Request(np.array([5], np.int32), Sampling(max_tokens=tokens), n=n)
            return len([c async for got in engine.generate(request) for c in got.each()])

        doomed = asyncio.create_task(count(3, 127))
        kept = asyncio.create_task(count(1, 127))
        waiting = asyncio.create_task(count(2, 3))
        await busy(engine)
        assert engine._thread._decoder.rows == 4

        # when
        doomed.cancel()

        # then the one that waited gets the room before the other long one ends, and nothing is left running
        assert await waiting == 2
        assert not kept.done()
        assert await kept == 1
        with pytest.raises(asyncio.CancelledError):
            await doomed
        return engine._thread._decoder.rows

    assert asyncio.run(asyncio.wait_for(scenario(), LIMIT_S)) == 0


def test_a_request_cancelled_while_it_waits_is_never_decoded(endless: str, rollout: Make, busy: Any) -> None:
    engine = rollout(endless, max_rows=1)

    async def scenario() -> int:
        # given a full engine and two requests that wait
        async def count(tokens: int) -> int:
            request = Request(np.array([5], np.int32), Sampling(max_tokens=tokens))
            return len([c async for got in engine.generate(request) for c in got.each()])

        first, doomed, last = (asyncio.create_task(count(tokens)) for tokens in (40, 127, 1))
        await busy(engine)
        passes: list[Any] = []
        engine._model.register_forward_pre_hook(lambda *_: passes.append(1))

        # when
        doomed.cancel()
        assert (await first, await last) == (1, 1)
        return len(passes)

    # then no pass was spent on it
    assert asyncio.run(asyncio.wait_for(scenario(), LIMIT_S)) <= 41


def test_leaving_the_iteration_early_aborts_the_rest(endless: str, rollout: Make, busy: Any, idle: Any) -> None:
    engine = rollout(endless)

    async def scenario() -> None:
        # given two responses of which one is wanted
        stream = engine.generate(Request(np.array([5], np.int32), Sampling(max_tokens=100), n=2))
        requests = [Request(np.array([6], np.int32), Sampling(max_tokens=1))]
        other = [c async for got in engine.generate(requests[0]) for c in got.each()]
        pending = asyncio.ensure_future(anext(stream))
        await busy(engine)
        # when
        pending.cancel()
        await asyncio.wait([pending])
        # then
        await idle(engine)
        assert len(other) == 1

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(np.zeros(0, np.int32), Sampling()), "one token or more"),
        (Request(np.zeros((2, 2), np.int32), Sampling()), "shape"),
        (Request(np.array([1.5]), Sampling()), "token ids, not float64"),
        (Request(np.array([3, 43], np.int32), Sampling(max_tokens=2)), "token id 43 .* vocabulary of 43"),
        (Request(np.array([-1], np.int32), Sampling(max_tokens=2)), "token id -1"),
        (Request(np.full(100, 5, np.int32), Sampling(max_tokens=29)), "need 129; the model's context is 128"),
        (Request(np.array([5], np.int32), Sampling(max_tokens=2), n=257), "max_rows=256, not 257"),
        (Request(np.array([5], np.int32), Sampling(max_tokens=2), n=0), "not 0"),
    ],
)
def test_a_request_that_cannot_run_fails_alone(
    tiny: str, rollout: Make, generate: Any, request_: Request, message: str
) -> None:
    engine = rollout(tiny)
    with pytest.raises(EngineError, match=message):
        generate(engine, [request_])
    ((one,),) = generate(engine, [Request(np.full(100, 5, np.int32), Sampling(max_tokens=28))])
    assert len(one.token_ids) <= 28


def test_an_error_in_the_decode_thread_reaches_everyone_who_waits(tiny: str, rollout: Make) -> None:
    # given a model that fails at its third pass
    engine = rollout(tiny, max_rows=4)
    passes = 0

    def fail(*_: Any) -> None:
        nonlocal passes
        passes += 1
        if passes == 3:
            raise RuntimeError("out of luck")

    hook = engine._model.register_forward_pre_hook(fail)
    requests = [Request(np.array([5 + i], np.int32), Sampling(max_tokens=100), n=2) for i in range(4)]

    async def scenario() -> list[Any]:
        async def one(request: Request) -> int:
            return len([c async for got in engine.generate(request) for c in got.each()])

        # when two requests run and two wait for room
        return await asyncio.gather(*(one(r) for r in requests), return_exceptions=True)

    outcomes = asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))

    # then all get an error of their own with the cause, and the engine goes on with what comes next
    assert [type(outcome) for outcome in outcomes] == [EngineError] * 4
    assert len({id(outcome) for outcome in outcomes}) == 4
    assert all("out of luck" in str(outcome) for outcome in outcomes)
    assert isinstance(outcomes[0].__cause__, RuntimeError)
    hook.remove()
    assert asyncio.run(asyncio.wait_for(scenario(), LIMIT_S)) == [2] * 4


def test_broken_weights_are_an_error_and_not_a_response(tiny: str, rollout: Make, generate: Any) -> None:
    engine = rollout(tiny)
    engine._model.lm_head.weight[7] = float("nan")
    with pytest.raises(EngineError, match="not finite"):
        generate(engine, [Request(np.array([5], np.int32), Sampling(max_tokens=3))])


def test_closing_ends_what_runs_and_refuses_what_comes(endless: str, busy: Any) -> None:
    engine = TransformersEngine(endless)
    request = Request(np.array([5], np.int32), Sampling(max_tokens=127), n=8)

    async def one() -> int:
        return len([c async for got in engine.generate(request) for c in got.each()])

    async def scenario() -> None:
        # given a request that runs
        running = asyncio.create_task(one())
        await busy(engine)
        # when
        await engine.close()
        # then
        with pytest.raises(EngineError, match="closed"):
            await running
        with pytest.raises(EngineError, match="closed"):
            await one()

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
    assert not engine._thread._thread.is_alive()


def test_what_is_no_model_folder_is_refused_with_its_path(tmp_path: Any, tiny: str) -> None:
    with pytest.raises(ConfigError, match=r"nowhere' does not exist"):
        TransformersEngine(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        TransformersEngine(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ConfigError, match="cannot be loaded"):
        TransformersEngine(str(tmp_path))
    with pytest.raises(ConfigError, match="dtype 'int8'"):
        TransformersEngine(tiny, dtype="int8")
    with pytest.raises(ConfigError, match="device 'nonsense'"):
        TransformersEngine(tiny, device="nonsense")


def test_a_folder_that_lacks_weights_is_refused_by_their_names(tmp_path: Any, tiny: str) -> None:
    # given a checkpoint without its last norm
    model = AutoModelForCausalLM.from_pretrained(tiny)
    state = {name: t for name, t in model.state_dict().items() if name != "model.norm.weight"}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ConfigError, match=r"lacks weights: model\.norm\.weight"):
        TransformersEngine(str(tmp_path))


def test_capabilities_say_what_the_model_allows(tiny: str, rollout: Make) -> None:
    capabilities = rollout(tiny, max_rows=5).capabilities
    assert (capabilities.context, capabilities.max_rows) == (128, 5)
    assert capabilities.swap == {"drain", "partial", "in_flight"}
    assert capabilities.token_versions
