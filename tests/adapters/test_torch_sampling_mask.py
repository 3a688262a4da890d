"""Sampling masks: draws, log-probs and training over the tokens that top-p, top-k and min-p left."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import asyncflow_sdk as af
from asyncflow_sdk.errors import SchemaError
from asyncflow_sdk.testing import EchoRollout, EchoTrain
from asyncflow_sdk.types import Batch
from asyncflow_sdk.types.events import StepTrained
from asyncflow_sdk.workflow.loops.engine_gateway import EngineGateway
from asyncflow_torch.collate import KeptTokens
from asyncflow_torch.generation.sampler import draw
from asyncflow_torch.train import TorchEngine

Make = Callable[..., Any]
PROMPT = np.array([5, 9, 30], np.int32)
HOT = {"temperature": 1.3, "top_k": 2}
MASK = ("kept_ids", "kept_ids_counts")


@dataclass(frozen=True)
class Expectation(af.Algorithm):
    """The gradient of the sum of rewards times ratios."""

    normaliser: str = "constant"

    def advantages(self, batch: Batch) -> Any:
        return batch.array("reward")

    def loss(self, tokens: af.PackedTokens) -> tuple[Any, dict[str, Any]]:
        return -((tokens.logprobs - tokens.behaviour).exp() * tokens.advantages).sum(), {}


class Gradients(TorchEngine):
    """An engine that shows its gradients."""

    @property
    def gradients(self) -> dict[str, Any]:
        return {name: each.grad for name, each in self._masters.named.items()}


def batch_of(prompts: list[Any], got: list[Any], **more: Any) -> Batch:
    columns = {name: [np.asarray(each.columns[name]) for each in got] for name in got[0].columns}
    return Batch.of({
        "prompt_ids": prompts, "response_ids": [each.token_ids for each in got],
        "logprobs": [np.asarray(each.logprobs) for each in got], **columns, **more,
    })  # fmt: skip


def test_the_gradient_is_that_of_the_truncated_policy(endless: str, rollout: Make, generate: Any) -> None:
    """Of responses of three tokens, each of the two likeliest, with centred rewards."""
    # given all responses that can be drawn, and the gradient of the expected reward by plain autograd
    engine = rollout(endless)
    sampling = af.Sampling(max_tokens=3, **HOT)
    masked, whole = (
        {
            tuple(each.token_ids.tolist()): each
            for each in generate(engine, [af.Request(PROMPT, replace(sampling, sampling_mask=mask), 256, 7)])[0]
        }
        for mask in (True, False)
    )
    responses = sorted(masked)
    assert len(responses) == 8
    assert whole.keys() == masked.keys()
    rewards = np.random.default_rng(0).normal(size=8)
    model = AutoModelForCausalLM.from_pretrained(endless)
    logprobs = []
    for response in responses:
        logits = model(torch.tensor([[*PROMPT.tolist(), *response]])).logits[0, len(PROMPT) - 1 : -1] / 1.3
        kept = logits.masked_fill(logits < logits.topk(2).values[:, -1:], -torch.inf)
        logprobs.append(kept.log_softmax(-1).gather(1, torch.tensor(response)[:, None]).sum())
    share = torch.stack(logprobs).exp()
    rewards -= (share.detach().numpy() * rewards).sum()
    (share * torch.tensor(rewards, dtype=torch.float32)).sum().neg().backward()
    wanted = {name: each.grad for name, each in model.named_parameters()}

    # then each log-prob of the engine is that of the truncated policy, and the shares are all there are
    drawn = np.array([masked[each].logprobs.sum() for each in responses])
    np.testing.assert_allclose(drawn, torch.stack(logprobs).detach(), atol=1e-5)
    assert abs(np.exp(drawn).sum() - 1) < 1e-5

    # when
    def error(given: dict[Any, Any]) -> float:
        step = Gradients(endless, algorithm=Expectation(), temperature=1.3)
        worth = (share.detach().numpy() * rewards).astype(np.float32)
        step.begin_step(0)
        step.accumulate(batch_of([PROMPT] * 8, [given[each] for each in responses], reward=worth))
        off = torch.stack([(step.gradients[name] - wanted[name]).norm() for name in wanted]).norm()
        return float(off / torch.stack([each.norm() for each in wanted.values()]).norm())

    # then
    assert error(masked) < 1e-5
    assert error(whole) > 0.05


@pytest.mark.parametrize("cut", [{"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.1, "repetition_penalty": 1.2}])
def test_kept_tokens_are_those_of_the_draw_and_log_probs_are_theirs(
    cut: dict[str, Any], endless: str, rollout: Make, trainer: Make, generate: Any, prompts: list[Any]
) -> None:
    # given requests with and without a mask, which decode together
    engine = rollout(endless)
    sampling = af.Sampling(max_tokens=9, temperature=0.8, sampling_mask=True, **cut)
    greedy = af.Sampling(max_tokens=4, temperature=0.0, sampling_mask=True, top_k=4)
    plain = af.Sampling(max_tokens=12, temperature=0.8)
    requests = [af.Request(prompt, sampling, 3, seed) for seed, prompt in enumerate(prompts)]
    others = [
        af.Request(prompts[0], greedy),
        af.Request(prompts[0], replace(plain, sampling_mask=True)),
        af.Request(prompts[0], plain),
    ]
    *groups, (likeliest,), (unrestricted,), (unasked,) = generate(engine, [*requests, *others])
    got = [each for group in groups for each in group]

    # then whatever is not restricted keeps nothing
    assert not unasked.columns
    assert [each.columns["kept_ids_counts"].tolist() for each in (likeliest, unrestricted)] == [[0] * 4, [0] * 12]
    counts = np.concatenate([each.columns["kept_ids_counts"] for each in got])
    assert counts.min() >= 1
    assert 1 < counts.max() <= cut.get("top_k", 42)
    if "repetition_penalty" in cut:
        return  # its draws are no truncation of the policy

    # and trainers compute the same log-probs, over the same tokens
    batch = batch_of([request.prompt_ids for request in requests for _ in range(3)], got)
    found = trainer(endless, temperature=0.8).logprobs(batch)
    np.testing.assert_allclose(found.values, batch.ragged("logprobs").values, atol=1e-4)
    whole = trainer(endless, temperature=0.8).logprobs(
        Batch.of({name: batch[name] for name in ("prompt_ids", "response_ids")})
    )
    assert (found.values > whole.values + 1e-3).any()


def test_a_response_in_parts_keeps_what_one_draw_keeps(
    endless: str, rollout: Make, passes: Make, generate: Any, prompts: list[Any], make_update: Make
) -> None:
    # given responses that nothing interrupts
    engine = rollout(endless)
    sampling = af.Sampling(max_tokens=20, sampling_mask=True, top_p=0.9)
    requests = [af.Request(prompt, sampling, 2, seed) for seed, prompt in enumerate(prompts[:3])]
    whole = generate(engine, requests)

    async def load(gateway: EngineGateway) -> None:
        async with gateway.stopped(interrupt=True):
            await engine.load_weights(make_update(dict(engine.held_weights())))
            gateway.take(1)

    # when a load interrupts them after six tokens
    async def in_parts() -> list[list[af.Completion]]:
        gate, gateway = passes(6), EngineGateway(engine, 0, asyncio.Event(), sampling=sampling)

        async def answer(request: af.Request) -> list[af.Completion]:
            parts = [each async for got in gateway.generate(request) for each in got.completion.each()]
            return sorted(parts, key=lambda each: each.index)

        running = [asyncio.create_task(answer(request)) for request in requests]
        await gate.reached()
        stopping = asyncio.create_task(load(gateway))
        await asyncio.sleep(0)
        gate.go_on()
        await stopping
        return await asyncio.gather(*running)

    parts = asyncio.run(asyncio.wait_for(in_parts(), 60))

    # then
    for one, other in zip(whole, parts, strict=True):
        for a, b in zip(one, other, strict=True):
            assert b.spans == ((0, 0, 6), (1, 6, 20))
            assert np.asarray(b.token_ids).tolist() == a.token_ids.tolist()
            np.testing.assert_allclose(b.logprobs, a.logprobs, atol=1e-4)
            assert {name: b.columns[name].tolist() for name in MASK} == {
                name: a.columns[name].tolist() for name in MASK
            }


def test_a_mask_that_does_not_fit_its_tokens_is_refused(endless: str, trainer: Make) -> None:
    engine, good = trainer(endless), {"kept_ids": [[7, 8, 9]], "kept_ids_counts": [[2, 0, 1]]}
    for change, message in (
        ({"kept_ids_counts": [[2, 1]]}, "do not have one of kept_ids_counts for each response token"),
        ({"kept_ids_counts": [[3, 1, -1]]}, "have kept_ids_counts outside the vocabulary of 43"),
        ({"kept_ids_counts": [[2**62] * 4], "kept_ids": [[]]}, "do not have one of kept_ids_counts"),
        ({"kept_ids_counts": [[2**62, 2**62, 2**63 - 2**62]], "kept_ids": [[]]}, "have kept_ids_counts outside the"),
        (
            {"kept_ids_counts": [[2.0, 0.0, 1.0]]},
            "column 'kept_ids_counts' is .*float64.*; a sampling mask has whole",
        ),
        ({"kept_ids": [[7.0, np.nan, 9.0]]}, "column 'kept_ids' is .*float64.*; a sampling mask has whole numbers"),
        ({"kept_ids_counts": [[2, 0, 2]]}, "have other kept_ids than their kept_ids_counts say"),
        ({"kept_ids": [[7, 43, 9]]}, "have kept_ids outside the vocabulary of 43"),
        ({"kept_ids": [[7, 8, 10]]}, "have a response token missing from its kept_ids"),
    ):
        mask = {
            name: af.Ragged.of([np.array(row)]) if row else af.Ragged.of([row], np.int64)
            for name, (row,) in {**good, **change}.items()
        }
        with pytest.raises(SchemaError, match=message):
            engine.logprobs(Batch.of({"prompt_ids": [[1]], "response_ids": [[7, 4, 9]], **mask}))
    for name, rows in good.items():
        with pytest.raises(SchemaError, match="kept_ids"):
            engine.logprobs(Batch.of({"prompt_ids": [[1]], "response_ids": [[7, 4, 9]], name: rows}))


class Writes(torch.utils._python_dispatch.TorchDispatchMode):  # noqa: SLF001
    """Counts the elements that indexed writes touch."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index_put_.default:
            shape = torch.broadcast_shapes(*(each.shape for each in args[1]))
            self.elements += math.prod(shape) * math.prod(args[0].shape[len(args[1]) :])
        return func(*args, **(kwargs or {}))


def test_a_cut_writes_each_kept_token_once() -> None:
    """Not a row of the vocabulary for each."""
    ids = torch.cat([torch.arange(first, first + 50) for first in range(8)])
    kept, logits = KeptTokens(torch.tensor([0, 50, 50, *range(100, 450, 50)]), ids), torch.zeros(9, 1000)
    with Writes() as writes:
        kept.cut_(logits)

    assert writes.elements == 400
    assert (logits > -1).sum(1).tolist() == [50, 1000, *[50] * 7]


@pytest.mark.parametrize("cut", [{"top_k": 9}, {"top_k": 7}, {"top_p": 1 - 1e-9}])
def test_a_draw_that_keeps_all_tokens_counts_none(cut: dict[str, float]) -> None:
    logits, ones = torch.randn(4, 7, generator=torch.Generator().manual_seed(1)), torch.ones(4)
    cuts = {"top_k": ones.long() * cut.get("top_k", 0), "top_p": ones * cut.get("top_p", 1.0), "min_p": ones * 0}
    token, logprob, kept = draw(logits, ones, ones / 2, masked=ones.bool(), **cuts)

    assert not kept.any()
    torch.testing.assert_close(logprob, logits.log_softmax(-1).gather(1, token[:, None])[:, 0])


def test_tokens_left_by_a_penalty_alone_have_log_probs() -> None:
    """Their share of the whole vocabulary may be 0 in float32."""
    logits, seen = torch.tensor([[200.0, 1.0, 0.0]]), torch.tensor([[True, False, False]])
    one, on = torch.ones(1), torch.ones(1, dtype=torch.bool)
    cuts = {"top_k": one.long(), "top_p": one, "min_p": one * 0, "seen": seen, "penalty": one * 1e4}

    assert [each.tolist() for each in draw(logits, one, one / 2, masked=on, **cuts)] == [
        [1],
        [0.0],
        [[False, True, False]],
    ]


def lengths(response_ids: af.Ragged) -> list[float]:
    return [float(row.sum()) for row in response_ids]


async def twice(turns: af.Turns) -> None:
    await turns.generate(max_tokens=3)
    turns.observe([7, 8])
    await turns.generate(max_tokens=3)


def workflow(model: str, **changes: Any) -> af.Workflow:
    sampling = af.Sampling(max_tokens=8, sampling_mask=True, top_p=0.8)
    rollout = {"prompt": "prompt_ids", "group_size": 4, "sampling": sampling, "launcher": "thread"}
    usual: dict[str, Any] = {
        "prompts": {"prompt_ids": af.Ragged.of([[5, 6], [7, 8, 9]])}, "reward": af.Stage(lengths, task="reward", launcher="thread"),
        "rollout": af.Rollout(**{"engine": "transformers", "model": model} | rollout | changes.pop("rollout", {})),
        "train": af.Train("torch", model=model, learning_rate=1e-3, launcher="thread", algorithm=af.GRPO(kl=af.KL(coef=0.1))),
        "stages": [af.Stage(af.Logprobs("torch", model=model), gives=["ref_logprobs"], launcher="thread")],
    }  # fmt: skip
    return af.Workflow(**usual | {"batch_size": 8, "steps": 2, "seed": 3} | changes)


def test_a_run_trains_over_the_kept_tokens(endless: str, tmp_path: Path) -> None:
    """Of an agent's turns, with an evaluation by the same engine, and log-probs of a reference."""
    evaluation = af.Evaluation(prompts={"prompt_ids": af.Ragged.of([[5, 6]])}, every=1, reward=lengths)
    run = workflow(endless, rollout={"agent": twice}, evaluate=evaluation)
    steps = list[dict[str, float]]()
    result = run.run(
        tmp_path / "run", on_event=lambda event: isinstance(event, StepTrained) and steps.append(event.metrics)
    )

    assert "top_p cut them, and log-probs are of the tokens kept by each draw, in training, too" in str(run)
    assert result.summary["balanced"]
    assert len(result.evaluations) == 2
    first = steps[0]
    assert first["logprob_drift"] < 1e-4
    assert abs(first["kl"]) < 1e-4


def test_engines_without_masks_are_refused_at_start(endless: str, tmp_path: Path) -> None:
    sampling = af.Sampling(sampling_mask=True, top_p=0.8)
    with pytest.raises(
        af.ConfigError, match="engine 'vllm' gives no sampling mask: leave sampling_mask=True out, or use"
    ):
        workflow(endless, rollout={"engine": "vllm", "launcher": "local"})
    with pytest.raises(af.ConfigError, match="EchoRollout gives no sampling mask"):
        EchoRollout().capabilities.check("EchoRollout", sampling)
    assert not EchoTrain.sampling_mask
    with pytest.raises(af.ConfigError, match="engine 'timed' computes log-probs over the whole vocabulary"):
        workflow(endless, train=af.Train("timed", launcher="thread"), stages=[])
    scored = af.Stage(af.Logprobs("timed", model=endless), gives=["ref_logprobs"], launcher="thread")
    with pytest.raises(af.ConfigError, match="engine 'timed' computes log-probs over the whole vocabulary"):
        workflow(endless, stages=[scored])
    with pytest.raises(
        af.WorkerFailed, match="EchoTrain computes log-probs over the whole vocabulary, and the draws"
    ):
        workflow(endless, train=af.Train("echo", launcher="thread"), stages=[], steps=1).run(tmp_path / "run")


def test_a_set_aside_evaluation_has_a_mask_only_for_a_stage_that_needs_it(endless: str) -> None:
    aside = af.Rollout("transformers", model=endless, launcher="thread")
    evaluation = af.Evaluation(
        prompts={"prompt_ids": af.Ragged.of([[5, 6]])}, every=1, reward=lengths, rollout=aside,
        sampling=af.Sampling(max_tokens=8, sampling_mask=True, top_k=3),
    )  # fmt: skip
    both = af.Stage(
        af.Logprobs("torch", model=endless), gives=["ref_logprobs"], launcher="thread", partitions=("", "evaluation")
    )

    assert not workflow(endless, evaluate=evaluation).plan.rollouts[-1].sampling.sampling_mask
    assert not evaluation.sampling_of(aside.changed(sampling=af.Sampling(sampling_mask=True))).sampling_mask
    assert workflow(endless, evaluate=evaluation, stages=[both]).plan.rollouts[-1].sampling.sampling_mask


@pytest.mark.parametrize(
    ("cut", "said", "unsaid"),
    [
        (
            {"top_k": 4, "repetition_penalty": 1.2},
            "in training, too; repetition_penalty is in no log-prob",
            "8 to 27",
        ),
        ({"repetition_penalty": 1.2}, "the whole vocabulary; repetition_penalty is in no log-prob", "8 to 27"),
        ({}, "sampling_mask=True has no effect: nothing cuts them", "cut them, and"),
    ],
)
def test_what_a_mask_does_is_said(cut: dict[str, Any], said: str, unsaid: str, endless: str) -> None:
    text = str(workflow(endless, rollout={"sampling": af.Sampling(max_tokens=8, sampling_mask=True, **cut)}))
    assert said in text
    assert unsaid not in text
