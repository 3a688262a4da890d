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

import msgspec
import numpy as np
import one_vllm
import pytest

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, EngineError, EngineGone, WeightError
from asyncflow_sdk.testing import Conformance
from asyncflow_sdk.testing.kit.conformance import checks_of
from asyncflow_sdk.types.events import Loaded

STEPS = 4

# The shared server is there after an engine that used it.
SHARED = [each.name for each in checks_of("rollout") if each.tier in ("basic", "full") and each.name != "closes"]
kit = Conformance("rollout", one_vllm.attached, only=SHARED, limit_s=240.0)


@kit.parametrize
def test_an_attached_engine_conforms(check: Any) -> None:
    check()


any_order = Conformance("rollout", one_vllm.attached, only=["any_order"], limit_s=60.0)


@any_order.parametrize
def test_an_attached_engine_conforms_in_any_order(check: Any) -> None:
    check()


@pytest.fixture(scope="module")
def lab() -> Iterator[Any]:
    from asyncflow_sdk.testing.kit.rollout_lab import RolloutLab
    from asyncflow_torch.reference import HuggingFacePolicy

    made = RolloutLab(one_vllm.attached, HuggingFacePolicy(), {}, limit_s=240.0)
    made.start()
    yield made
    made.close()


@pytest.fixture(scope="module")
def info(lab: Any) -> Any:
    """What the server says of itself, as JSON."""
    url = one_vllm.server(lab.policy.folder).url
    with urllib.request.urlopen(f"{url}/server_info?config_format=json", timeout=60) as answer:
        return json.load(answer)


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
    info: Any, part: str, field: str, value: Any, reason: str
) -> None:
    from asyncflow_vllm.server import ServerInfo

    changed = json.loads(json.dumps(info))
    of = changed["vllm_config"][part] if part else changed["vllm_config"]
    assert field in of  # as it is called today
    of[field] = value
    msgspec.convert(info, ServerInfo).check("the server")
    with pytest.raises(ConfigError, match=f"the server cannot be used: .*{reason}"):
        msgspec.convert(changed, ServerInfo).check("the server")


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


def test_a_whole_run_uses_a_server_and_proves_each_version(lab: Any, tmp_path: Path) -> None:
    lab.close()
    model, events = lab.policy.folder, []
    workflow = af.Workflow(
        prompts={"prompt_ids": af.Ragged.of([[5, 6, 7], [8, 9], [10, 11, 12, 13]])},
        rollout=af.Rollout(
            "vllm-server", model=model, url=one_vllm.server(model).url, key_env=one_vllm.KEY_ENV, max_rows=32,
            group_size=8, prompt="prompt_ids", sampling=af.Sampling(max_tokens=8),
        ),
        reward=share_of_high,
        train=af.Train("torch", model=model, lr=3e-3, threads=1),
        batch_size=24, steps=STEPS, staleness=af.Staleness(max_staleness=1),
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


def test_a_load_that_breaks_off_is_followed_by_nothing_but_a_whole_version(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(lab: Any) -> None:
        prompts, version = lab.policy.prompts(3, seed=31), lab.version + 1
        whole = lab.policy.tensors(version)
        name = next(name for name in whole if "k_proj.weight" in name)
        broken = lab.make_update(version, {**whole, name: whole[name][:-1].copy()})
        running, pause = [], lab.engine._access.pause

        async def pause_what_runs() -> None:  # it begins no sooner, so that it has not ended by now
            running.append(
                asyncio.create_task(lab.answer(lab.request(prompts[0], 4, temperature=1.0, max_tokens=200)))
            )
            while not lab.engine._access._asked:
                await asyncio.sleep(0)
            await pause()

        with monkeypatch.context() as blind:  # as if the comparison with the folder had found nothing
            blind.setattr(lab.engine._checkpoint, "check", lambda update: {})
            blind.setattr(lab.engine._access, "pause", pause_what_runs)
            with pytest.raises(WeightError, match="could not be loaded whole: rank 0: "):
                await lab.load(broken)
        for waiting in (*running, lab.answer(lab.request(prompts[0])), lab.engine.logprobs([[5]], [[6]])):
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
        while not lab.engine._access._asked and not own.done():
            await asyncio.sleep(0)
        await lab.engine.interrupt()
        await lab.engine.interrupt()
        await own
        (choice,) = (await other)["choices"]
        assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 200)

    lab.ask(interrupted, "an interruption beside others")


def test_what_the_server_refuses_is_one_requests_error(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token ids beyond the vocabulary are not tried: vLLM dies of them, and never hears of them (see the kit's bad requests)."""

    async def body(lab: Any) -> None:
        (prompt,) = lab.policy.prompts(1, seed=33)
        with monkeypatch.context() as blind:  # as if nothing had been looked at here
            blind.setattr(lab.engine._limits, "check", lambda request: [int(each) for each in request.prompt_ids])
            for request, reason in (
                (lab.request(np.zeros(0, np.int32)), "(?s)answered with status 4.*token_ids"),
                (lab.request(np.full(lab.context + 1, 5)), "(?s)answered with status 4.*length"),
            ):
                with pytest.raises(EngineError, match=reason) as refused:
                    await lab.answer(request)
                assert not isinstance(refused.value, EngineGone)
        await lab.check_greedy([prompt], when=" after what was refused")

    lab.ask(body, "what the server refuses")


def test_a_server_that_dies_is_named_by_all_that_is_asked_of_it(lab: Any) -> None:
    """The last test here: the shared server is gone."""
    server = one_vllm.server(lab.policy.folder)

    async def body(lab: Any) -> None:
        (prompt,) = lab.policy.prompts(1, seed=34)
        running = asyncio.create_task(lab.answer(lab.request(prompt, 4, temperature=1.0, max_tokens=200)))
        while not lab.engine._access._asked and not running.done():
            await asyncio.sleep(0)
        os.killpg(server.process.pid, signal.SIGKILL)
        for waiting in (running, lab.update(), lab.answer(lab.request(prompt)), lab.engine.logprobs([[5]], [[6]])):
            with pytest.raises(EngineGone, match="the vLLM server at http://127.0.0.1:"):
                await waiting

    lab.ask(body, "a server that dies")
