"""Stop texts over tokens, and restricted draws whose log-probs stay those of the whole vocabulary."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

import asyncflow_sdk as af
from asyncflow_sdk.interfaces import Completion, Request
from asyncflow_sdk.types import Sampling
from asyncflow_torch.generation.sampler import draw, uniforms

Generate = Callable[[Any, list[Request]], list[list[Completion]]]


def text_of(folder: str, ids: Any) -> str:
    text: str = Tokenizer.from_file(f"{folder}/tokenizer.json").decode(np.asarray(ids).tolist())
    return text


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_response_ends_with_the_token_that_completes_a_stop_text(
    endless: str,
    rollout: Callable[..., Any],
    generate: Generate,
    prompts: list[np.ndarray[Any, Any]],
    interrupted: bool,
) -> None:
    # given responses, and a text over two of their tokens each, between which they may have been interrupted
    engine = rollout(endless)
    assert engine.capabilities.stop_texts
    wholes = [
        group[0] for group in generate(engine, [Request(p, Sampling(max_tokens=24, temperature=0)) for p in prompts])
    ]
    requests, wanted = [], []
    for prompt, whole in zip(prompts, wholes, strict=True):
        text = text_of(endless, whole.token_ids)
        stop = text[5:7]
        count = next(n for n in range(25) if stop in text_of(endless, whole.token_ids[:n]))
        had = count - 1 if interrupted else 0
        sampling = Sampling(max_tokens=24, temperature=0, stop=("no such text", stop))
        so_far = np.append(prompt, whole.token_ids[:had]).astype(np.int32)
        requests.append(Request(so_far, sampling, drawn=had, decode=functools.partial(text_of, endless)))
        wanted.append(np.asarray(whole.token_ids[had:count]))
    # when they are generated together, beside one without a stop
    groups = generate(engine, [*requests, Request(prompts[0], Sampling(max_tokens=24, temperature=0))])
    # then
    for (got,), ids in zip(groups, wanted, strict=False):
        np.testing.assert_array_equal(got.token_ids, ids)
        assert got.finish_reason == "stop"
        assert len(got.logprobs) == len(ids)
    assert len(groups[-1][0].token_ids) == 24


@pytest.mark.parametrize("drawn", [0, 1, 3])
@pytest.mark.parametrize("part", [1, 2, 7])
def test_a_watch_finds_a_text_in_the_part_that_completes_it_and_loses_it_with_its_tokens(
    part: int, drawn: int
) -> None:
    # given tokens of two letters, and none for some; a text over three of them, after more than the window
    words = [*["ab"] * 40, "", "cS", "", "TO", "Pd", *["ef"] * 9]
    ids = list(range(len(words)))
    request = Request(
        np.array([0, 0, *ids[:drawn]], np.int32), Sampling(stop=["none", "STOP"]), drawn=drawn,
        decode=lambda some: "".join(words[each] for each in some),
    )  # fmt: skip
    assert request.stops is not None
    assert request.stops.end(ids) == 45
    # when the response comes in parts, the first of it in the prompt
    watch, rest = request.watch(), ids[drawn:]
    assert watch is not None
    found = [end for end in range(part, len(rest) + part, part) if watch.found(rest[:end])]
    # then
    assert found[0] == next(end for end in range(part, len(rest) + part, part) if end + drawn >= 45)
    assert found == list(range(found[0], len(rest) + part, part))
    assert not watch.found(rest[: 44 - drawn])
    assert watch.found(rest[: 45 - drawn])


def lengths(response_ids: Any) -> list[float]:
    return [float(len(row)) for row in response_ids]


def test_an_engine_that_knows_no_texts_has_its_responses_cut(tiny: str, tmp_path: Path) -> None:
    # given an engine that repeats its prompt
    rollout = af.Rollout(
        "echo", model=tiny, group_size=4, launcher="thread", sampling=af.Sampling(max_tokens=16, stop=["+3", "99"])
    )
    workflow = af.Workflow(
        prompts=["12+34=", "7=99+3"], rollout=rollout, reward=lengths, train=af.Train("echo", launcher="thread"),
        batch_size=8, steps=1,
    )  # fmt: skip
    # when
    workflow.run(tmp_path / "run")
    # then the ids have the text, and the response ends before it
    ((_, batch),) = af.read_steps(tmp_path / "run")
    found = {text: text_of(tiny, ids) for text, ids in zip(batch["response"], batch["response_ids"], strict=True)}
    assert found == {"12": "12+3", "7=": "7=99"}
    spans = [span.tolist() for span in batch.ragged("version_spans")]
    assert spans == [[[0, 0, len(ids)]] for ids in batch["response_ids"]]


# ---- restricted draws


def drawn(logits: Any, rows: int = 40_000, **restrictions: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The share of each token among many draws, and the log-prob it was given."""
    settings = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | restrictions
    per_row = {
        name: torch.full((rows,), value, dtype=torch.int64 if name == "top_k" else torch.float32)
        for name, value in settings.items()
        if name != "seen"
    }
    if "seen" in settings:
        per_row["seen"] = settings["seen"].expand(rows, -1)
    uniform = uniforms(torch.arange(rows), torch.zeros(rows, dtype=torch.int64))
    token, logprob, _ = draw(logits.expand(rows, -1), torch.full((rows,), 0.7), uniform, **per_row)
    given = np.full(len(logits), np.nan)
    given[token.numpy()] = logprob.numpy()
    return np.bincount(token.numpy(), minlength=len(logits)) / rows, given


def softmax(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    share = np.exp(logits - logits.max())
    return share / share.sum()


def test_draws_are_restricted_and_log_probs_are_not() -> None:
    logits = torch.tensor([2.0, 1.5, 1.0, 0.0, -1.0, -3.0])
    plain = softmax(logits.numpy() / 0.7)
    seen = torch.tensor([True, False, False, False, True, False])
    penalised = logits.numpy().copy()
    penalised[0] /= 1.8
    penalised[4] *= 1.8
    penalised = softmax(penalised / 0.7)
    floor = np.where(plain >= 0.3 * plain.max(), plain, 0)
    both = np.where(penalised >= 0.3 * penalised.max(), penalised, 0)
    for restrictions, share in (
        ({"min_p": 0.3}, floor / floor.sum()),
        ({"seen": seen, "penalty": 1.8}, penalised),
        ({"seen": seen, "penalty": 1.8, "min_p": 0.3}, both / both.sum()),
    ):
        found, given = drawn(logits, **restrictions)
        np.testing.assert_allclose(found, share, atol=0.015)
        assert not found[share == 0].any()
        np.testing.assert_allclose(given[found > 0], np.log(plain[found > 0]), rtol=1e-5)


def test_a_penalty_counts_the_prompt_and_the_response_of_each_row(
    endless: str, rollout: Callable[..., Any], generate: Generate, prompts: list[np.ndarray[Any, Any]]
) -> None:
    # given greedy responses by a penalty that no token seen before can overcome, beside others without
    engine = rollout(endless)
    sampling = Sampling(max_tokens=16, temperature=0, repetition_penalty=1e6)
    requests = [Request(p, sampling, n=2) for p in prompts] + [
        Request(prompts[0], Sampling(max_tokens=16, temperature=0))
    ]
    # when
    groups = generate(engine, requests)
    # then no token comes twice while others are left with a logit above 0
    for prompt, group in zip(prompts, groups, strict=False):
        for got in group:
            first = np.asarray(got.token_ids)[:8].tolist()
            assert len({*first} - {*prompt.tolist()}) == len(first)
    repeated = np.asarray(groups[-1][0].token_ids).tolist()
    assert len(set(repeated)) < len(repeated)
    # and the log-probs are those of the policy
    (scored,) = _scores(engine, prompts[0], groups[0][0])
    np.testing.assert_allclose(groups[0][0].logprobs, scored, atol=1e-4)


def _scores(engine: Any, prompt: Any, got: Completion) -> Any:
    import asyncio

    return asyncio.run(engine.logprobs([prompt.tolist()], [np.asarray(got.token_ids).tolist()]))


def test_an_engine_that_cannot_is_refused_before_its_first_prompt(tiny: str, tmp_path: Path) -> None:
    rollout = af.Rollout(
        "echo", model=tiny, group_size=4, launcher="thread", sampling=af.Sampling(min_p=0.1, max_tokens=4)
    )
    workflow = af.Workflow(
        prompts=["1="],
        rollout=rollout,
        reward=lengths,
        train=af.Train("echo", launcher="thread"),
        batch_size=4,
        steps=1,
    )
    with pytest.raises(af.WorkerFailed, match="EchoRollout cannot draw with min_p=0.1: .* It can with: top_k, top_p"):
        workflow.run(tmp_path / "run")
