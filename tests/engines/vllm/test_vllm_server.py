"""vLLM behind its HTTP server keeps to the contract of rollout engines, and a server that cannot is refused with the reasons."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import one_vllm
import pytest
from engine_ends import HttpGate, cut_short
from plain_generation import check_evaluations

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, EngineError, EngineGone, WeightError
from asyncflow_sdk.testing import Conformance
from asyncflow_sdk.types.events import Loaded

STEPS = 4

# It differs from an engine in this process in how it reaches vLLM; all checks of what both share are asked there.
OF_REQUESTS = ["capabilities", "completions", "logprobs", "stops", "bad_requests", "does_not_block", "abort"]
OF_DRAWS = ["whole_context", "restricted", "stop_texts", "continued", "interrupted", "scores"]
OF_LOADS = ["update", "stale_cache", "memory", "update_in_flight", "during_load"]
kit = Conformance("rollout", one_vllm.attached, only=[*OF_REQUESTS, *OF_DRAWS, *OF_LOADS], limit_s=240.0)


@kit.parametrize
def test_an_attached_engine_conforms(check: Any) -> None:
    check()


@pytest.fixture(scope="module")
def lab() -> Iterator[Any]:
    from asyncflow_sdk.testing.kit.rollout.lab import RolloutLab
    from asyncflow_torch.reference import HuggingFacePolicy

    made = RolloutLab(one_vllm.attached, HuggingFacePolicy(), {}, limit_s=240.0)
    made.start()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("part", "field", "value", "reason"),
    [
        ("", "weight_transfer_config", None, "its weights come by 'none': start it with --weight-transfer-config"),
        ("weight_transfer_config", "backend", "nccl", "its weights come by 'nccl'"),
        ("parallel_config", "worker_extension_cls", "", "do not say what they loaded: --worker-extension-cls"),
        (
            "model_config",
            "logprobs_mode",
            "raw_logprobs",
            "before the temperature: --logprobs-mode processed_logprobs",
        ),
        ("parallel_config", "data_parallel_size", 2, "several front ends or replicas"),
        ("parallel_config", "_api_process_count", 2, "several front ends or replicas"),
        ("parallel_config", "nnodes", 2, "its workers are on several hosts"),
        ("", "speculative_config", {"method": "ngram"}, "it drafts tokens"),
        ("", "lora_config", {"max_loras": 1}, "it serves LoRA adapters"),
        ("", "watermark_config", {}, "it marks what it draws"),
        ("", "kv_transfer_config", {}, "its cache is shared"),
    ],
)
def test_a_server_that_cannot_is_refused_with_the_reason(
    lab: Any, part: str, field: str, value: Any, reason: str
) -> None:
    def changed(answer: bytes) -> bytes:
        info = json.loads(answer)
        of = info["vllm_config"][part] if part else info["vllm_config"]
        assert field in of  # as it is called today
        of[field] = value
        return json.dumps(info).encode()

    with (
        HttpGate(one_vllm.server(lab.policy.folder).url, change={"/server_info": changed}) as gate,
        pytest.raises(ConfigError, match=f"cannot be used: .*{reason}"),
    ):
        lab.make(model=lab.policy.folder, url=gate.url)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"url": "http://10.1.2.3:8000"}, "is another host: vLLM's routes for weights ask for no key"),
        ({"url": "127.0.0.1:8000"}, "is not like http://127.0.0.1"),
        ({"key_env": "NOT_SET_ANYWHERE"}, "key_env='NOT_SET_ANYWHERE'"),
        ({"max_rows": 0}, "max_rows must be 1 or more"),
        ({"key_env": None}, "the vLLM server at http.* cannot be used: it asks for a key: say key_env="),
        ({"key_env": "PATH"}, "cannot be used: it has another key than that in key_env=, .* --api-key"),
        ({}, "another engine of this host has the server"),
    ],
)
def test_what_cannot_be_attached_to_is_refused(lab: Any, options: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        lab.make(model=lab.policy.folder, **options)


def test_a_server_started_for_something_else_is_refused_with_what_it_lacks(lab: Any) -> None:
    server = one_vllm.Server(lab.policy.folder, [])
    try:
        with pytest.raises(ConfigError, match=r"--enable-scale-out; .* VLLM_SERVER_DEV_MODE=1"):
            lab.make(model=lab.policy.folder, url=server.url)
    finally:
        server.close()


def share_of_high(response_ids: Any) -> list[float]:
    return [float(sum(int(token) > 20 for token in row)) / len(row) for row in response_ids]


@pytest.mark.starts("rollout vllm-server")
def test_a_whole_run_uses_a_server_proves_each_version_and_evaluates_exact_ones(lab: Any, tmp_path: Path) -> None:
    lab.close()
    held_out = [each.tolist() for each in lab.policy.prompts(6, seed=40)]
    model, events = lab.policy.folder, []
    workflow = af.Workflow(
        prompts={"prompt_ids": af.Ragged.of([[5, 6, 7], [8, 9], [10, 11, 12, 13]])},
        rollout=af.Rollout(
            "vllm-server", model=model, url=one_vllm.server(model).url, key_env=one_vllm.KEY_ENV, max_rows=32,
            group_size=8, prompt="prompt_ids", sampling=af.Sampling(max_tokens=8),
        ),
        reward=share_of_high,
        train=af.Train("torch", model=model, learning_rate=3e-3, threads=1),
        batch_size=24, steps=STEPS, staleness=af.Staleness(max_staleness=1), save_steps=1,
        evaluate=af.Evaluation(prompts={"prompt_ids": held_out}, every=2, reward=share_of_high),
        weights=af.Weights(probe=af.Probe(((5, 6, 7), (8, 9)), ((10, 11, 12), (13, 14))), verify=["probe"]),
    )  # fmt: skip

    result = workflow.run(tmp_path / "run", on_event=events.append)

    assert (result.summary["steps"], result.summary["balanced"]) == (STEPS, True)
    loaded = [event.version for event in events if isinstance(event, Loaded)]  # each proven by its log-probs
    assert max(loaded) >= STEPS - 2
    drew = set()
    for _, batch in af.read_steps(tmp_path / "run"):
        assert batch.array("reward").tolist() == pytest.approx(share_of_high(batch.ragged("response_ids")))
        drew |= {int(version) for spans in batch.ragged("version_spans") for version, _, _ in spans}
    assert max(drew) >= 1
    assert STEPS in check_evaluations(result, held_out, tokens=8)
    lab.start()


def test_an_engine_begins_on_the_folders_weights_whatever_the_server_was_left_on(lab: Any) -> None:
    async def body(lab: Any) -> None:
        prompts = lab.policy.prompts(3, seed=30)
        await lab.update(5)
        await lab.check_greedy(prompts, when=" after the update")

    lab.ask(body, "an update")
    lab.close()
    url = one_vllm.server(lab.policy.folder).url
    with urllib.request.urlopen(urllib.request.Request(f"{url}/pause?mode=keep", method="POST"), timeout=60):
        pass
    lab.start()

    async def again(lab: Any) -> None:
        assert lab.version == 0
        await lab.check_greedy(lab.policy.prompts(3, seed=30), when=" of an engine that came later")

    lab.ask(again, "an engine that came later")


async def begun(lab: Any) -> None:
    """What was asked for before runs: the server takes requests in order."""
    await lab.answer(lab.request(lab.policy.prompts(1)[0], max_tokens=1))


def test_a_load_that_breaks_off_is_followed_by_nothing_but_a_whole_version(lab: Any, tmp_path: Path) -> None:
    async def body(lab: Any) -> None:
        prompts, version = lab.policy.prompts(3, seed=31), lab.version + 1
        broken = cut_short(lab.make_update(version), "model.layers.1.self_attn.k_proj.weight", tmp_path / "short")
        running = asyncio.create_task(lab.answer(lab.request(prompts[0], 4, temperature=1.0, max_tokens=200)))
        await begun(lab)
        with pytest.raises(WeightError, match="could not be loaded whole: rank 0: "):
            await lab.load(broken)
        (ended,) = await asyncio.gather(running, return_exceptions=True)  # it may have ended before the load began
        assert not isinstance(ended, BaseException) or "holds a mixture of versions" in str(ended)
        for waiting in (lab.answer(lab.request(prompts[0])), lab.engine.logprobs([[5]], [[6]])):
            with pytest.raises(EngineError, match="holds a mixture of versions"):
                await waiting
        await lab.update(version + 1)
        await lab.check_greedy(prompts, when=" after a broken load and a whole one")

    lab.ask(body, "a load that breaks off")


def test_requests_of_others_are_not_aborted(lab: Any) -> None:
    url = one_vllm.server(lab.policy.folder).url
    body = {
        "token_ids": [5, 6, 7],
        "sampling_params": {"max_tokens": 200, "ignore_eos": True, "temperature": 1.0, "detokenize": False},
    }

    def ask() -> Any:
        asked = urllib.request.Request(
            f"{url}/inference/v1/generate", json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {one_vllm.KEY}"},
        )  # fmt: skip
        with urllib.request.urlopen(asked, timeout=120) as answer:
            return json.load(answer)

    async def interrupted(lab: Any) -> None:
        (prompt,) = lab.policy.prompts(1, seed=32)
        other = asyncio.create_task(asyncio.to_thread(ask))
        own = asyncio.create_task(lab.answer(lab.request(prompt, 8, temperature=1.0, max_tokens=200), aborted=True))
        await begun(lab)
        await lab.engine.interrupt()
        await lab.engine.interrupt()
        await own
        (choice,) = (await other)["choices"]
        assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 200)

    lab.ask(interrupted, "an interruption beside others")


def test_a_server_that_dies_is_named_by_all_that_is_asked_of_it(lab: Any) -> None:
    """The last test here: the shared server is gone."""
    server = one_vllm.server(lab.policy.folder)

    async def body(lab: Any) -> None:
        (prompt,) = lab.policy.prompts(1, seed=34)
        endless = lab.request(prompt, 4, temperature=1.0, max_tokens=200)
        running = asyncio.create_task(one_vllm.ask_until_an_error(lab, endless))
        await begun(lab)
        os.killpg(server.process.pid, signal.SIGKILL)
        for waiting in (running, lab.update(), lab.answer(lab.request(prompt)), lab.engine.logprobs([[5]], [[6]])):
            with pytest.raises(EngineGone, match="the vLLM server at http://127.0.0.1:"):
                await waiting

    lab.ask(body, "a server that dies")
