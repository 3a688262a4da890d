"""What is asked of vLLM is what it does, no more: no defaults, no tokenizer, log-probs under the whole vocabulary."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, EngineError
from asyncflow_torch.demo.model import EOS


def test_log_probs_are_under_the_whole_vocabulary_where_the_draw_is_cut(tied: Any) -> None:
    async def body(lab: Any) -> None:
        (prompt,) = lab.policy.prompts(1, seed=1)
        for sampling in (
            af.Sampling(max_tokens=12, temperature=0.7, top_k=3),
            af.Sampling(max_tokens=12, temperature=1.4, top_p=0.6),
            af.Sampling(max_tokens=12, temperature=1.2, top_k=8, top_p=0.8),
        ):
            beside = asyncio.create_task(lab.answer(lab.request(prompt, max_tokens=12)))  # greedy, in the same batch
            for got in await lab.answer(af.Request(prompt, sampling, 8, seed=1)):
                lab.check_logprobs(prompt, got, temperature=sampling.temperature)
                for at in range(len(got.token_ids)):
                    before = np.concatenate([prompt, got.token_ids[:at]])
                    likeliest = np.argsort(-lab.policy.next_logprobs(lab.version, before, sampling.temperature))
                    assert got.token_ids[at] in likeliest[: sampling.top_k or None]
            await beside

    tied.ask(body, "draws that are cut")


def test_defaults_of_the_model_folder_do_not_count_but_its_end_token_does(tied: Any) -> None:
    async def body(lab: Any) -> None:
        ended = 0
        for prompt in lab.policy.prompts(4, seed=2):
            for got in await lab.answer(lab.request(prompt, 8, temperature=1.3, max_tokens=40, seed=2)):
                lab.check_logprobs(prompt, got, temperature=1.3)
                ids = np.asarray(got.token_ids).tolist()
                assert (EOS in ids) == (got.finish_reason == "stop")
                assert EOS not in ids[:-1]
                ended += got.finish_reason == "stop"
        assert 0 < ended < 32

    tied.ask(body, "responses that end")


def test_seeds(tied: Any) -> None:
    async def body(lab: Any) -> None:
        (prompt,) = lab.policy.prompts(1, seed=3)

        async def drawn(**more: Any) -> list[list[int]]:
            got = await lab.answer(lab.request(prompt, 2, temperature=1.3, max_tokens=10, **more))
            return [np.asarray(each.token_ids).tolist() for each in got]

        one = await drawn(seed=5)
        assert one[0] != one[1]
        assert await drawn(seed=5) == one
        assert await drawn(seed=6) != one
        assert (await drawn(seed=5, first=1))[0] == one[1]
        assert await drawn(seed=5, drawn=1) != one  # behind the first token other numbers come than before it
        assert await drawn() != await drawn()

    tied.ask(body, "seeds")


@pytest.mark.parametrize(
    ("prompt", "more", "reason"),
    [
        ([], {}, "this one has none"),
        ([[5]], {}, r"int\d+\[1, 1\] came"),
        ([0.5], {}, r"float64\[1\] came"),
        ([5, 43], {}, "token id 43 is not in the vocabulary of 43"),
        ([-1], {}, "token id -1 is not"),
        ([5] * 500, {"max_tokens": 13}, "a prompt of 500 tokens and max_tokens=13 need 513; the context is 512"),
        ([5], {"n": 33}, "n must be 1 to max_rows=32, not 33"),
        ([5], {"temperature": 0.001}, "vLLM draws at temperature 0 or from 0.01 on, not at 0.001"),
        ([5], {"drawn": 1}, "no response has drawn 1 of 1 tokens"),
    ],
)
def test_bad_requests_are_refused_with_the_reason(tied: Any, prompt: Any, more: Any, reason: str) -> None:
    async def body(lab: Any) -> None:
        sampling = af.Sampling(max_tokens=more.pop("max_tokens", 4), temperature=more.pop("temperature", 1.0))
        request = af.Request(np.asarray(prompt) if prompt else np.zeros(0, np.int32), sampling, **more)
        with pytest.raises(EngineError, match=reason):
            await lab.answer(request)
        await lab.check_greedy(lab.policy.prompts(1, seed=4))

    tied.ask(body, "a bad request")


def test_what_cannot_be_scored_is_refused(tied: Any) -> None:
    async def body(lab: Any) -> None:
        for prompts, responses, reason in (
            ([[]], [[5]], "a prompt of 0 and a response of 1 tokens cannot be scored"),
            ([[5] * 256], [[5] * 256], "both together can be 511"),
            ([[5]], [[43]], "token id 43"),
            ([[5]], [], "are no pairs"),
        ):
            with pytest.raises(EngineError, match=reason):
                await lab.engine.logprobs(prompts, responses)
        assert await lab.engine.logprobs([[5]], [[]]) == [[]]
        (longest,) = await lab.engine.logprobs([[5] * 255], [[6] * 256])
        assert len(longest) == 256

    tied.ask(body, "what cannot be scored")


@pytest.mark.parametrize("turns", [1, 2, 4])
def test_an_interruption_meets_what_vllm_has_not_heard_of(tied: Any, turns: int) -> None:
    async def body(lab: Any) -> None:
        requests = [
            lab.request(prompt, 4, temperature=1.0, max_tokens=400) for prompt in lab.policy.prompts(3, seed=5)
        ]
        running = [asyncio.create_task(lab.answer(request, aborted=True)) for request in requests]
        for _ in range(turns):
            await asyncio.sleep(0)
        await lab.engine.interrupt()
        for completions in await asyncio.gather(*running):
            assert {each.finish_reason for each in completions} <= {"aborted"}
        await lab.check_greedy(lab.policy.prompts(2, seed=6), when=" after an interruption")

    tied.ask(body, "an interruption at once")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_rows": 0}, "must be 1 or more"),
        ({"gpu_memory_utilisation": 0.5}, "vLLM has no engine argument 'gpu_memory_utilisation'"),
        (
            {"logprobs_mode": "raw_logprobs"},
            "option 'logprobs_mode' of vLLM cannot be set here: log-probs are those of",
        ),
        ({"max_num_seqs": 4}, "say max_rows"),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_starts(tied: Any, options: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        tied.make(model=tied.policy.folder, **options)


def test_a_folder_that_is_none_is_refused(tied: Any, tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        tied.make(model=str(tmp_path / "nothing"))
