"""TransformersEngine: what it generates, how requests share it, and how it refuses and fails."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from children import warm_python
from transformers import AutoModelForCausalLM

from asyncflow_sdk.errors import ConfigError, EngineError
from asyncflow_sdk.interfaces import Request
from asyncflow_sdk.plugins import registry
from asyncflow_sdk.types import Batch, Sampling
from asyncflow_sdk.workflow.model_folder import ModelFolder

Make = Callable[..., Any]
Watch = Callable[..., Any]
TransformersEngine: Any = registry().get("rollout", "transformers").load()
LIMIT_S = 60


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


def test_rows_that_ended_come_before_others_of_their_request(tiny: str, rollout: Make, passes: Watch) -> None:
    # given a request whose rows end with different tokens, held up after some have ended
    stops = tuple(range(2, 23))
    sampling = Sampling(max_tokens=6, stop_ids=stops)
    engine, request = rollout(tiny), Request(np.array([5, 6], np.int32), sampling, n=64, seed=0)

    async def scenario() -> list[list[Any]]:
        gate = passes(2)
        stream = engine.generate(request)
        first = asyncio.ensure_future(anext(stream))
        await gate.reached()
        await asyncio.sleep(0.1)  # longer than rows wait for others
        gate.hold(1)
        gate.go_on()
        # when the second pass is over and the third is not: then they are there
        parts = [list((await first).each())]
        gate.go_on()
        return [*parts, *[list(each.each()) async for each in stream]]

    parts = asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
    group = sorted((each for part in parts for each in part), key=lambda completion: completion.index)
    assert [completion.index for completion in group] == list(range(64))
    assert {len(completion.token_ids) for completion in parts[0]} <= {1, 2}
    assert all(len(c.token_ids) == 6 or c.token_ids[-1] in stops for c in group)


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


def test_more_rows_than_fit_wait_their_turn(tiny: str, rollout: Make, generate: Any, passes: Watch) -> None:
    # given room for 8 rows and 10 requests of 3
    watched = passes()

    groups = generate(
        rollout(tiny, max_rows=8), [Request(np.array([5 + i]), Sampling(max_tokens=5), n=3) for i in range(10)]
    )

    # then all are served, and never more than fit at once
    assert [len(group) for group in groups] == [3] * 10
    assert 3 < max(rows for rows, _ in watched.shapes) <= 8


def _counted(engine: Any, prompt: int, tokens: int, n: int = 1) -> Any:
    """A task: how many responses came."""

    async def count() -> int:
        request = Request(np.array([prompt], np.int32), Sampling(max_tokens=tokens), n=n)
        return len([c async for got in engine.generate(request) for c in got.each()])

    return asyncio.ensure_future(count())


def test_a_late_request_is_served_while_an_earlier_one_runs(endless: str, rollout: Make, passes: Watch) -> None:
    engine = rollout(endless)

    async def scenario() -> bool:
        # given a request that has begun
        gate = passes(2)
        long = _counted(engine, 5, 120)
        await gate.reached()
        # when another comes
        short = _counted(engine, 8, 2)
        await asyncio.sleep(0)
        gate.hold(3)
        gate.go_on()
        # then it ends first
        assert await short == 1
        gate.go_on()
        assert not long.done()
        return await long == 1

    assert asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))


def test_cancelling_one_generation_aborts_its_rows_and_no_others(endless: str, rollout: Make, passes: Watch) -> None:
    engine = rollout(endless, max_rows=4)

    async def scenario() -> None:
        # given two running requests that fill the engine, one to be cancelled, and two that wait for room
        gate = passes(2)
        doomed, kept = _counted(engine, 5, 127, 3), _counted(engine, 5, 127)
        waiting, never = _counted(engine, 6, 3, 2), _counted(engine, 7, 127, 2)
        await gate.reached()
        assert gate.shapes == [(1, 1), (4, 1)]

        # when
        doomed.cancel()
        never.cancel()
        await asyncio.wait([doomed, never])
        gate.hold(7)
        gate.go_on()

        # then the one that waited gets the room before the other long one ends, and the other is never read
        await gate.reached()
        assert await waiting == 2
        gate.go_on()
        assert await kept == 1
        assert set(gate.shapes[9:]) == {(1, 1)}
        assert doomed.cancelled()
        assert never.cancelled()

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))


def test_leaving_the_iteration_early_aborts_the_rest(endless: str, rollout: Make, passes: Watch) -> None:
    engine = rollout(endless)

    async def scenario() -> None:
        # given two responses of which none is wanted any more
        gate = passes(2)
        stream = engine.generate(Request(np.array([5], np.int32), Sampling(max_tokens=100), n=2))
        pending = asyncio.ensure_future(anext(stream))
        await gate.reached()
        # when
        pending.cancel()
        await asyncio.wait([pending])
        gate.go_on()
        # then the engine reads what comes next alone
        await _counted(engine, 6, 3)
        assert gate.shapes == [(1, 1), (2, 1), *[(1, 1)] * 3]

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(np.zeros(0, np.int32), Sampling()), "one token or more"),
        (Request(np.zeros((2, 2), np.int32), Sampling()), "shape"),
        (Request(np.array([1.5]), Sampling()), "token ids, not float64"),
        (Request(np.array([3, 43], np.int32), Sampling(max_tokens=2)), "token id 43 .* vocabulary of 43"),
        (Request(np.array([-1], np.int32), Sampling(max_tokens=2)), "token id -1"),
        (Request(np.full(100, 5, np.int32), Sampling(max_tokens=29)), "need 129; the context is 128"),
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


def test_an_error_in_a_pass_reaches_everyone_who_waits(tiny: str, rollout: Make, passes: Watch) -> None:
    # given a model that fails in its third pass, when two requests run and two wait for room
    engine = rollout(tiny, max_rows=4)
    passes().fail_at(3, RuntimeError("out of luck"))

    async def scenario() -> list[Any]:
        return await asyncio.gather(*(_counted(engine, 5 + i, 100, 2) for i in range(4)), return_exceptions=True)

    outcomes = asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))

    # then all get an error of their own with the cause, and the engine goes on with what comes next
    assert [type(outcome) for outcome in outcomes] == [EngineError] * 4
    assert len({id(outcome) for outcome in outcomes}) == 4
    assert all("out of luck" in str(outcome) for outcome in outcomes)
    assert isinstance(outcomes[0].__cause__, RuntimeError)
    assert asyncio.run(asyncio.wait_for(scenario(), LIMIT_S)) == [2] * 4


def test_broken_weights_are_an_error_and_not_a_response(tiny: str, rollout: Make, generate: Any) -> None:
    engine = rollout(tiny)
    dict(engine.held_weights())["lm_head.weight"][7] = float("nan")
    with pytest.raises(EngineError, match="not finite"):
        generate(engine, [Request(np.array([5], np.int32), Sampling(max_tokens=3))])


def test_closing_ends_what_runs_and_refuses_what_comes(endless: str, rollout: Make, passes: Watch) -> None:
    before = set(threading.enumerate())
    engine = rollout(endless)

    async def scenario() -> None:
        # given a request that runs
        gate = passes(2)
        running = _counted(engine, 5, 127, 8)
        await gate.reached()
        # when
        closing = asyncio.ensure_future(engine.close())
        await asyncio.sleep(0)
        gate.go_on()
        await closing
        # then
        with pytest.raises(EngineError, match="closed"):
            await running
        with pytest.raises(EngineError, match="closed"):
            await _counted(engine, 5, 1)

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
    assert set(threading.enumerate()) <= before


def test_what_is_no_model_folder_is_refused_with_its_path(tmp_path: Any, tiny: str) -> None:
    with pytest.raises(ConfigError, match=r"nowhere' does not exist"):
        TransformersEngine(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        TransformersEngine(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(ConfigError, match=r"has no model\.safetensors.*save_pretrained"):
        TransformersEngine(str(tmp_path))
    with pytest.raises(ConfigError, match="dtype 'int8'"):
        TransformersEngine(tiny, dtype="int8")
    with pytest.raises(ConfigError, match="device 'nonsense'"):
        TransformersEngine(tiny, device="nonsense")


def test_tokens_come_with_the_frequencies_of_the_distribution(
    endless: str, rollout: Make, generate: Any, prompts: list[np.ndarray]
) -> None:
    # given what the model says comes after a prompt
    model, count = AutoModelForCausalLM.from_pretrained(endless).eval(), 2000
    with torch.no_grad():
        logits = model(torch.tensor(prompts[0][None], dtype=torch.int64)).logits[0, -1].double()
    engine = rollout(endless, max_rows=count)
    likeliest = torch.argsort(-logits).tolist()
    held = torch.softmax(logits, 0)[likeliest].cumsum(0).tolist()
    fewest = next(n for n, share in enumerate(held, 1) if share >= 0.6)

    for cut, kept in (
        ({}, 43),
        ({"temperature": 0.5}, 43),
        ({"top_k": 2}, 2),
        ({"top_p": 1e-6}, 1),
        ({"top_p": 0.6}, fewest),
        ({"top_p": 0.99999, "top_k": 3}, 3),
    ):
        # when as many responses of one token are drawn
        sampling = Sampling(max_tokens=1, **cut)
        (group,) = generate(engine, [Request(prompts[0], sampling, n=count, seed=0)])

        # then frequencies fit (six standard deviations), nothing that was cut is drawn, and log-probs are under the whole vocabulary
        full = torch.log_softmax(logits / sampling.temperature, 0).numpy()
        wanted = np.where(np.isin(np.arange(43), likeliest[:kept]), np.exp(full), 0)
        wanted /= wanted.sum()
        drawn = np.concatenate([c.token_ids for c in group])
        shares = np.bincount(drawn, minlength=43) / count
        assert (np.abs(shares - wanted) <= 6 * np.sqrt(wanted * (1 - wanted) / count) + 1e-9).all(), cut
        assert set(drawn.tolist()) <= set(likeliest[:kept])
        np.testing.assert_allclose(np.concatenate([c.logprobs for c in group]), full[drawn], atol=1e-4)


def test_responses_end_at_the_end_tokens_of_all_files(tiny: str, rollout: Make, generate: Any, tmp_path: Any) -> None:
    folder = shutil.copytree(tiny, tmp_path / "model")  # whose tokenizer and configuration name 2
    said = json.loads((folder / "generation_config.json").read_text()) | {"eos_token_id": [4, 9]}
    (folder / "generation_config.json").write_text(json.dumps(said))

    request = Request(np.array([5, 6], np.int32), Sampling(max_tokens=20), n=64, seed=0)
    (group,) = generate(rollout(str(folder)), [request])

    assert {int(c.token_ids[-1]) for c in group if c.finish_reason == "stop"} == {2, 4, 9}


def test_long_and_short_rows_together_have_the_log_probs_of_the_train_engine(
    windowed: str, learned: str, rollout: Make, generate: Any, trainer: Any, passes: Watch
) -> None:
    """Where a layer looks back a few tokens only, and where positions end: a row that ended must not run out of them."""
    for folder in (windowed, learned):
        requests = [
            Request(np.resize(np.arange(3, 40), length).astype(np.int32), Sampling(max_tokens=tokens), n=n)
            for length, tokens, n in ((120, 4, 3), (3, 100, 2), (30, 20, 2))
        ]
        groups = generate(rollout(folder), requests)
        rows = [(r.prompt_ids, c) for r, group in zip(requests, groups, strict=True) for c in group]
        batch = Batch.of({"prompt_ids": [p for p, _ in rows], "response_ids": [c.token_ids for _, c in rows]})
        wanted = trainer(folder).logprobs(batch).values
        np.testing.assert_allclose(np.concatenate([c.logprobs for _, c in rows]), wanted, atol=1e-4)

    # and rows that have ended are dropped
    watched = passes()
    generate(rollout(learned), requests[:2])
    assert watched.shapes[-1] == (2, 1)


def test_a_folder_that_lacks_weights_is_refused_by_their_names(tmp_path: Any, tiny: str) -> None:
    # given a checkpoint without its last norm
    model = AutoModelForCausalLM.from_pretrained(tiny)
    state = {name: t for name, t in model.state_dict().items() if name != "model.norm.weight"}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ConfigError, match=r"lacks weights: model\.norm\.weight"):
        TransformersEngine(str(tmp_path))


def test_a_folder_with_nan_is_refused_by_the_names_of_its_weights(tmp_path: Any, tiny: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    model.model.norm.weight.data[3] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"has NaN in model\.norm\.weight"):
        TransformersEngine(str(tmp_path))


@pytest.mark.parametrize("file", ["../outside.safetensors", "/etc/passwd", "below/weights.safetensors"])
def test_an_index_that_names_a_file_outside_its_folder_is_refused(tmp_path: Path, tiny: str, file: str) -> None:
    # given a folder whose weights lie beside it
    shutil.copytree(tiny, folder := tmp_path / "folder")
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    names = AutoModelForCausalLM.from_pretrained(tiny).state_dict()
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, file)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    # when it is loaded here, or compared with the versions of a run
    for load in (TransformersEngine, ModelFolder):
        with pytest.raises(ConfigError, match=f"{file}', which is no file of its folder"):
            load(str(folder))


def test_no_code_of_a_model_folder_is_executed(tmp_path: Path, tiny: str) -> None:
    # given a folder with a model and a tokenizer of their own
    shutil.copytree(tiny, folder := tmp_path / "folder")
    own = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoTokenizer": ["own.Text", None]}
    for name in ("config.json", "tokenizer_config.json"):
        more = {"auto_map": own, "model_type": "own", "tokenizer_class": "Text"}
        (folder / name).write_text(json.dumps({**json.loads((folder / name).read_bytes()), **more}))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    # when its user answers each question with yes
    load = (
        f"from asyncflow_torch.{{}}; load_policy({str(folder)!r}, dtype='auto', device='cpu')",
        f"from asyncflow_torch.reference import HuggingFacePolicy as P; p = P({tiny!r}); p._folder = {str(folder)!r}; p._tokenizer",
    )
    for code in (load[0].format("policy import load_policy"), load[1]):
        subprocess.run([warm_python(), "-c", code], input=b"y\n" * 9, stderr=subprocess.PIPE, timeout=500)
    # then nothing of it ran
    assert not (tmp_path / "executed").exists()


def test_capabilities_say_what_the_model_allows(tiny: str, rollout: Make) -> None:
    capabilities = rollout(tiny, max_rows=5).capabilities
    assert (capabilities.context, capabilities.max_rows) == (128, 5)
    assert capabilities.swap == {"drain", "partial", "in_flight"}
    assert capabilities.token_versions
