"""Decoder: sharing of prompts, joining of waves, dropping of rows; and that none of it changes a token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from asyncflow_sdk.types import Batch, Sampling
from asyncflow_torch import kv, reading
from asyncflow_torch.decode import Decoder, end_tokens
from asyncflow_torch.lanes import Finished, Work
from asyncflow_torch.policy import load_policy


def _work(id: int, length: int, tokens: int, n: int = 2) -> Work:
    prompt = np.random.default_rng(id).integers(3, 43, length).astype(np.int32)
    sampling = Sampling(max_tokens=tokens, top_k=3 if id % 3 == 2 else 0)  # works 2 and 5 cut the tail
    return Work(id, prompt, n, sampling, seed=id)


def _add(results: dict[Any, Any], finished: Finished | None) -> None:
    if finished is not None:
        for i, key in enumerate(zip(finished.work.tolist(), finished.index.tolist(), strict=True)):
            assert key not in results
            results[key] = (finished.token_ids[i].tolist(), finished.logprobs[i])


def _run(decoder: Decoder, arrivals: dict[int, list[Work]]) -> dict[Any, Any]:
    """Decode works that arrive after given numbers of steps."""
    results: dict[Any, Any] = {}
    step = 0
    while arrivals or decoder.rows:
        if step in arrivals:
            _add(results, decoder.admit(arrivals.pop(step)))
        if decoder.rows:
            _add(results, decoder.step())
        step += 1
    return results


@pytest.fixture
def decoder(tiny: str) -> Callable[[], Decoder]:
    model = load_policy(tiny, dtype="float32", device="cpu")
    return lambda: Decoder(model)


def _same(got: dict[Any, Any], wanted: dict[Any, Any]) -> None:
    assert got.keys() == wanted.keys()
    for key, (tokens, logprobs) in wanted.items():
        assert got[key][0] == tokens
        np.testing.assert_allclose(got[key][1], logprobs, atol=2e-5)


WORKS = [_work(i, length, tokens, n) for i, (length, tokens, n) in enumerate(
    [(6, 30, 3), (1, 5, 2), (12, 40, 4), (3, 1, 2), (20, 12, 8), (6, 60, 1), (2, 25, 5)]
)]  # fmt: skip


def test_rows_that_come_and_go_have_the_tokens_they_have_alone(decoder: Callable[[], Decoder]) -> None:
    # given each work by itself
    alone: dict[Any, Any] = {}
    for work in WORKS:
        alone |= _run(decoder(), {0: [work]})
    assert len(alone) == 25

    # then so it is when they arrive together, and one after another into what runs
    _same(_run(decoder(), {0: list(WORKS)}), alone)
    _same(_run(decoder(), {3 * i: [work] for i, work in enumerate(WORKS)}), alone)
    _same(_run(decoder(), {0: WORKS[4:], 2: WORKS[:2], 9: WORKS[2:4]}), alone)


def test_late_rows_join_the_running_ones_in_one_pass(decoder: Callable[[], Decoder]) -> None:
    one = decoder()
    one.admit([_work(0, 6, 100)])
    one.step()
    one.admit([_work(1, 9, 100)])
    assert (one.waves, one.rows) == (1, 4)


@pytest.mark.parametrize("pass_tokens", [16384, 50])
def test_reading_again_with_the_same_weights_changes_no_token(
    decoder: Callable[[], Decoder], monkeypatch: Any, pass_tokens: int
) -> None:
    # given rows that came at different times, and how they go on undisturbed
    monkeypatch.setattr(reading, "PASS_TOKENS", pass_tokens)
    arrivals = {3 * i: [work] for i, work in enumerate(WORKS)}
    wanted = _run(decoder(), dict(arrivals))

    # when everything is read again after every fourth step
    one = decoder()
    step, steps = one.step, 0

    def step_and_read() -> Finished | None:
        nonlocal steps
        steps += 1
        finished = step()
        if steps % 4 == 0:
            rows = one.rows
            drawn = one.read_again({work.id: work.prompt for work in WORKS})
            assert all(0 < count < WORKS[id].sampling.max_tokens for id, count in drawn.items())
            assert one.rows == rows
        return finished

    one.step = step_and_read  # type: ignore[method-assign]
    _same(_run(one, dict(arrivals)), wanted)


def test_rows_read_again_have_no_padding_between_prompt_and_response(endless: str) -> None:
    # given a short prompt that has drawn twenty tokens, joined by a long one that has drawn one
    decoder = Decoder(load_policy(endless, dtype="float32", device="cpu"))
    works = [_work(0, 2, 50, n=1), _work(1, 30, 50, n=1)]
    results: dict[Any, Any] = {}
    decoder.admit(works[:1])
    for _ in range(19):
        decoder.step()
    decoder.admit(works[1:])

    # when
    assert decoder.read_again({0: works[0].prompt, 1: works[1].prompt}) == {0: 20, 1: 1}

    # then the cache is as wide as the longer of them, and both go on as if nothing had happened
    (wave,) = decoder._waves
    assert wave.cache.get_seq_length() == 30
    while decoder.rows:
        _add(results, decoder.step())
    alone: dict[Any, Any] = {}
    for work in works:
        alone |= _run(decoder, {0: [work]})
    _same(results, alone)


def test_rows_whose_joining_would_be_mostly_padding_take_turns(endless: str) -> None:
    # given one row that has read a hundred tokens, and many short ones
    decoder = Decoder(load_policy(endless, dtype="float32", device="cpu"))
    decoder.admit([_work(0, 110, 18, n=1)])
    decoder.admit([_work(i, 1, 18, n=8) for i in range(1, 9)])

    # then there are two waves, and a step takes one of them a token on
    assert (decoder.waves, decoder.rows) == (2, 65)
    results: dict[Any, Any] = {}
    steps = 0
    while decoder.rows:
        _add(results, decoder.step())
        steps += 1
    assert (len(results), steps) == (65, 34)


def test_a_group_reads_its_prompt_once(endless: str) -> None:
    # given a model that tells what it is given
    one = Decoder(load_policy(endless, dtype="float32", device="cpu"))
    shapes: list[Any] = []
    hook = one._model.model.embed_tokens.register_forward_hook(lambda _l, args, _o: shapes.append(args[0].shape))

    # when two works of eight have the same prompt, and one another
    twin = _work(0, 6, 2, n=8)
    one.admit([twin, Work(9, twin.prompt, 8, twin.sampling), _work(1, 4, 2, n=8)])
    hook.remove()

    # then
    assert shapes == [(2, 6)]
    assert one.rows == 24


def test_ended_rows_and_needless_padding_are_dropped(endless: str) -> None:
    # given a long prompt that ends soon, beside two short ones
    decoder = Decoder(load_policy(endless, dtype="float32", device="cpu"))
    decoder.admit([_work(0, 40, 3, n=3), _work(1, 2, 20, n=1), _work(2, 2, 20, n=1)])
    (wave,) = decoder._waves
    assert wave.mask is not None

    # when it has ended
    while decoder.rows > 2:
        decoder.step()

    # then its rows and its columns are gone
    assert len(wave.lanes) == 2
    assert wave.mask is None
    assert wave.cache.get_seq_length() == 4


def test_an_aborted_work_is_gone_and_the_others_are_not(decoder: Callable[[], Decoder]) -> None:
    one = decoder()
    results: dict[Any, Any] = {}
    _add(results, one.admit([WORKS[0], WORKS[2]]))
    one.step()
    one.abort([0])
    while one.rows:
        _add(results, one.step())
    assert {work for work, _ in results} == {2}


def test_a_cache_with_sliding_windows_is_never_joined_but_right(windowed: str) -> None:
    # given a model of which one layer forgets
    model = load_policy(windowed, dtype="float32", device="cpu")
    assert not kv.joinable(kv.new_cache(model))
    works = [_work(i, length, 20, 2) for i, length in enumerate((12, 12, 12))]

    # when works arrive apart
    decoder = Decoder(model)
    decoder.admit(works[:1])
    decoder.admit(works[1:])
    assert decoder.waves == 2
    decoder.clear()
    got = _run(decoder, {0: works[:1], 4: works[1:]})

    # then log-probs are those of one pass over the whole sequence
    for (work, _), (tokens, logprobs) in got.items():
        ids = torch.tensor([[*works[work].prompt.tolist(), *tokens]])
        with torch.no_grad():
            table = model(ids).logits[0].log_softmax(-1)[11:-1]
        wanted = table.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        np.testing.assert_allclose(logprobs, wanted, atol=1e-4)


def test_rows_that_ended_do_not_run_out_of_learned_positions(learned: str, trainer: Any) -> None:
    # given a row that ends near the end of the context, kept beside one that goes on for long
    decoder = Decoder(load_policy(learned, dtype="float32", device="cpu"))
    works = [_work(0, 120, 4, n=1), _work(1, 3, 100, n=1)]

    # when
    got = _run(decoder, {0: works})

    # then both have the log-probs the train engine gives them
    keys = sorted(got)
    batch = Batch.of(
        {
            "prompt_ids": [works[work].prompt for work, _ in keys],
            "response_ids": [np.array(got[key][0], np.int32) for key in keys],
        }
    )
    assert batch.ragged("response_ids").lengths.tolist() == [4, 100]
    wanted = trainer(learned).logprobs(batch)
    np.testing.assert_allclose(np.concatenate([got[key][1] for key in keys]), wanted.values, atol=1e-4)


def test_end_tokens_come_from_the_generation_configuration_first(tiny: str) -> None:
    model = load_policy(tiny, dtype="float32", device="cpu")
    assert end_tokens(model) == [2]
    model.generation_config.eos_token_id = [4, 9]
    assert end_tokens(model) == [4, 9]
    model.generation_config.eos_token_id = None
    assert end_tokens(model) == [2]
    model.config.eos_token_id = None
    assert end_tokens(model) == []
