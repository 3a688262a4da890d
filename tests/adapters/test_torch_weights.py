"""Loading weights into a rollout engine: all of a version, or nothing of it, or an engine that says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncflow_sdk.errors import EngineError, WeightError, WeightMismatch
from asyncflow_sdk.interfaces import Request
from asyncflow_sdk.testing.kit.updates import HeldUpdate
from asyncflow_sdk.types import Sampling

Make = Callable[..., Any]
REQUEST = Request(np.array([5, 6], np.int32), Sampling(max_tokens=12, temperature=0), n=1)


def _weights(engine: Any) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in engine.held_weights()}


def _logprobs(folder: str, weights: dict[str, Any]) -> Any:
    """Of response [7, 8] after prompt [5, 6], by transformers' own model with these weights."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    model.load_state_dict(weights, strict=False)
    with torch.no_grad():
        return model(torch.tensor([[5, 6, 7]])).logits[0].log_softmax(-1)[[1, 2], [7, 8]].numpy()


def _moved(weights: dict[str, Any]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {name: t + torch.randn(t.shape, generator=generator) for name, t in weights.items()}


def test_a_version_is_loaded_whole_and_generated_from(
    tiny: str, rollout: Make, generate: Any, make_update: Any, trainer: Any, batch: Any
) -> None:
    # given a trainer that has moved on
    engine, train = rollout(tiny), trainer(learning_rate=0.01)
    before = generate(engine, [REQUEST])
    train.train_step(batch)
    weights = dict(train.named_weights())

    # when
    taken = asyncio.run(engine.load_weights(make_update(weights)))

    # then every name is taken, every bit is there, and the engine generates differently
    assert taken == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in _weights(engine).items())
    after = generate(engine, [REQUEST])
    assert (after[0][0].token_ids.tolist(), after[0][0].logprobs.tolist()) != (
        before[0][0].token_ids.tolist(),
        before[0][0].logprobs.tolist(),
    )


def test_a_version_that_does_not_fit_is_refused_by_name_and_nothing_is_written(
    tiny: str, rollout: Make, make_update: Any
) -> None:
    # given a version wrong in four ways
    engine = rollout(tiny)
    old = _weights(engine)
    new = _moved(old)
    new["model.norm.weight"] = torch.zeros(63)
    new["lm_head.weight"] = new["lm_head.weight"].to(torch.bfloat16)
    new["model.layers.7.mlp.weight"] = torch.zeros(2)
    del new["model.layers.1.mlp.up_proj.weight"]

    # when
    with pytest.raises(WeightMismatch) as caught:
        asyncio.run(engine.load_weights(make_update(new, version=9)))

    # then the message lists all four, and the model is what it was to the bit
    message = str(caught.value)
    assert "version 9 does not fit" in message
    assert "model.norm.weight: the version has float32[63], the model float32[64]" in message
    assert "lm_head.weight: the version has bfloat16[43, 64], the model float32[43, 64]" in message
    assert "model.layers.7.mlp.weight: the model has no such weight" in message
    assert "model.layers.1.mlp.up_proj.weight: missing from the version" in message
    assert message.count("\n") == 5
    assert all(torch.equal(tensor, old[name]) for name, tensor in _weights(engine).items())


def test_after_a_load_that_broke_off_the_engine_refuses_until_a_version_is_whole(
    tiny: str, rollout: Make, generate: Any, make_update: Any
) -> None:
    # given an update that is not what its manifest promised, half-way
    engine = rollout(tiny)
    old = _weights(engine)
    bad = _moved(old)
    bad["model.norm.weight"] = torch.zeros(1)

    # when
    with pytest.raises(WeightError, match=r"written in part: .*model\.norm\.weight came as float32\[1\]"):
        asyncio.run(engine.load_weights(make_update(bad, promised=old)))

    # then nothing is generated from the mixture
    with pytest.raises(EngineError, match="mixture"):
        generate(engine, [REQUEST])

    # and a whole version mends it
    assert asyncio.run(engine.load_weights(make_update(old))) == old.keys()
    assert generate(engine, [REQUEST])[0][0].token_ids.size


def test_an_update_that_ends_early_is_a_mixture(tiny: str, rollout: Make, make_update: Any) -> None:
    engine = rollout(tiny)
    old = _weights(engine)
    short = dict(list(old.items())[:-1])
    with pytest.raises(WeightError, match=f"did not bring {list(old)[-1]}"):
        asyncio.run(engine.load_weights(make_update(short, promised=old)))


def test_a_cancelled_load_ends_before_the_caller_may_release_the_update(
    tiny: str, rollout: Make, make_update: Any
) -> None:
    # given an update in the middle of which the caller cancels
    engine = rollout(tiny)
    weights = _moved(_weights(engine))

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        arrays = {name: tensor.numpy() for name, tensor in weights.items()}
        update = HeldUpdate(1, arrays, halfway=lambda: loop.call_soon_threadsafe(loading.cancel))
        loading = asyncio.ensure_future(engine.load_weights(update))
        # when
        with pytest.raises(asyncio.CancelledError):
            await loading
        # then the error comes when all are read
        assert all(torch.equal(tensor, weights[name]) for name, tensor in engine.held_weights())

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_tied_weights_are_one_weight_under_either_name(tied: str, rollout: Make, make_update: Any) -> None:
    # given a model whose output layer is its embedding
    engine = rollout(tied)
    weights = _moved(_weights(engine))
    assert "model.embed_tokens.weight" in weights
    assert "lm_head.weight" not in weights

    # when it comes under its second name
    renamed = {n.replace("model.embed_tokens", "lm_head"): t for n, t in weights.items()}
    assert asyncio.run(engine.load_weights(make_update(renamed))) == renamed.keys()

    # then it is in both places
    (found,) = asyncio.run(engine.logprobs([[5, 6]], [[7, 8]]))
    np.testing.assert_allclose(found, _logprobs(tied, weights), atol=1e-4)


def test_models_that_threads_load_at_once_are_tied_and_so_are_later_ones(tied: str, rollout: Make) -> None:
    with ThreadPoolExecutor(8) as threads:
        engines = list(threads.map(lambda _: rollout(tied), range(16)))

    for engine in [*engines, rollout(tied)]:
        assert "lm_head.weight" not in dict(engine.held_weights())


def test_a_tied_weight_may_come_under_both_names_if_it_is_the_same(
    tied: str, rollout: Make, make_update: Any
) -> None:
    # given a version with both names, equal to the bit, a NaN among them
    engine = rollout(tied)
    old = _weights(engine)
    weights = _moved(old)
    weights["model.embed_tokens.weight"][3, 3] = float("nan")
    both = weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}

    # when
    assert asyncio.run(engine.load_weights(make_update(both))) == both.keys()

    # then
    held = dict(engine.held_weights())
    assert held.keys() == both.keys()
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert torch.equal(held[name].view(torch.int32), weights["model.embed_tokens.weight"].view(torch.int32))

    # and when they differ, or one does not come, nothing is written
    held = _weights(engine)
    both["lm_head.weight"] = torch.zeros_like(both["lm_head.weight"])
    for update in (make_update(both), make_update(weights, promised=both)):
        with pytest.raises(WeightMismatch, match=r"lm_head\.weight: differs from model\.embed_tokens\.weight"):
            asyncio.run(engine.load_weights(update))
    assert all(torch.equal(t.view(torch.int32), held[n].view(torch.int32)) for n, t in _weights(engine).items())


def test_a_tensor_nobody_announced_is_a_mixture(tiny: str, rollout: Make, make_update: Any) -> None:
    engine = rollout(tiny)
    old = _weights(engine)
    with pytest.raises(WeightError, match=r"extra came as float32\[2\], and nothing was announced"):
        asyncio.run(engine.load_weights(make_update(old | {"extra": torch.zeros(2)}, promised=old)))


def test_a_version_of_another_dtype_is_refused_naming_both(tiny: str, rollout: Make, make_update: Any) -> None:
    # given a float32 engine and a bfloat16 version
    engine = rollout(tiny)
    old = _weights(engine)
    update = make_update({name: tensor.to(torch.bfloat16) for name, tensor in old.items()})

    # when
    with pytest.raises(WeightMismatch) as caught:
        asyncio.run(engine.load_weights(update))

    # then every tensor is named
    for name, tensor in old.items():
        shape = list(tensor.shape)
        assert f"{name}: the version has bfloat16{shape}, the model float32{shape}\n" in str(caught.value)
    assert "dtype and the engine's must be the same" in str(caught.value)


def test_what_is_held_is_the_version_loaded_under_its_names(tied: str, rollout: Make, make_update: Any) -> None:
    # given an engine of bfloat16
    engine = rollout(tied, dtype="bfloat16")
    assert all(torch.equal(t, dict(engine.held_weights())[n]) for n, t in _weights(engine).items())

    # when it is given a version in which the tied weight has its second name
    moved = _moved({n: t.float() for n, t in _weights(engine).items()})
    new = {n.replace("model.embed_tokens", "lm_head"): t.to(torch.bfloat16) for n, t in moved.items()}
    asyncio.run(engine.load_weights(make_update(new)))

    # then
    held = dict(engine.held_weights())
    assert held.keys() == new.keys()
    assert all(torch.equal(held[n], t) and held[n].dtype == t.dtype for n, t in new.items())


def test_given_responses_are_scored_as_the_train_engine_does(
    tiny: str, rollout: Make, make_update: Any, trainer: Any, batch: Any
) -> None:
    # given a trainer that has moved on, its weights loaded
    engine, train = rollout(tiny), trainer(learning_rate=0.01)
    train.train_step(batch)
    asyncio.run(engine.load_weights(make_update(dict(train.named_weights()))))

    # when
    prompts, responses = ([row.tolist() for row in batch.ragged(n)] for n in ("prompt_ids", "response_ids"))
    rows = asyncio.run(engine.logprobs(prompts, responses))

    # then
    assert [len(row) for row in rows] == [len(ids) for ids in responses]
    np.testing.assert_allclose(np.concatenate(rows), train.logprobs(batch).values, atol=1e-5)
    assert asyncio.run(engine.logprobs([], [])) == []


@pytest.mark.parametrize(
    ("prompts", "responses", "message"),
    [
        ([[5]], [], "1 prompts and 0 responses are no pairs"),
        ([[5], [6]], [[43], [3]], "rows 0 have response_ids outside the vocabulary of 43"),
        ([[-1]], [[3]], "prompt_ids outside"),
        ([[]], [[3]], "empty prompt"),
        ([[5]], [[]], "empty response"),
        ([[0.5]], [[3]], r"sequence 0 is float64\[1\]"),
        ([[[5]]], [[3]], r"sequence 0 is int64\[1, 1\]"),
        ([[5] * 100], [[3] * 29], "longer than the model's context of 128"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    tiny: str, rollout: Make, prompts: Any, responses: Any, message: str
) -> None:
    engine = rollout(tiny)
    with pytest.raises(EngineError, match=message):
        asyncio.run(engine.logprobs(prompts, responses))
    assert len(asyncio.run(engine.logprobs([[5]], [[3]]))[0]) == 1


def test_nothing_is_held_or_scored_while_the_engine_has_a_mixture(tiny: str, rollout: Make, make_update: Any) -> None:
    engine = rollout(tiny)
    old = _weights(engine)
    with pytest.raises(WeightError, match="did not bring"):
        asyncio.run(engine.load_weights(make_update(dict(list(old.items())[:3]), promised=old)))
    with pytest.raises(EngineError, match="mixture"):
        engine.held_weights()
    with pytest.raises(EngineError, match="mixture"):
        asyncio.run(engine.logprobs([[5]], [[3]]))
    asyncio.run(engine.load_weights(make_update(old)))
    assert dict(engine.held_weights()).keys() == old.keys()
