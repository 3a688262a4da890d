"""What an SGLang server and its engine do to each other, where the conformance kit does not look."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import one_server
import pytest
from engine_ends import HttpGate

import asyncflow_sdk as af
from asyncflow_http.server import HttpServer
from asyncflow_sdk.errors import EngineGone
from asyncflow_sdk.testing.kit.updates import HeldUpdate

PROMPT = np.array([5, 6, 7], np.int32)
Work = Callable[[Any], Coroutine[Any, Any, Any]]


def with_engine(work: Work, **options: Any) -> Any:
    """What ``work`` comes to, of an engine that is attached to the shared server."""

    async def main() -> Any:
        engine = one_server.attached(one_server.model(), **options)
        try:
            return await asyncio.wait_for(work(engine), 120)
        finally:
            await engine.close()

    return asyncio.run(main())


async def answer(engine: Any, prompt: Any = PROMPT, n: int = 1, **sampling: Any) -> list[af.Completion]:
    sampling = {"temperature": 0.0, "max_tokens": 8, **sampling}
    request = af.Request(np.asarray(prompt, np.int32), af.Sampling(**sampling), n)
    return sorted([got async for got in engine.generate(request)], key=lambda got: got.index)


async def begun(engine: Any) -> None:
    """What was asked for before runs: the server takes requests in order."""
    await answer(engine, max_tokens=1)


async def ask_until_an_error(engine: Any, **sampling: Any) -> None:
    """A request is under way at any moment, however fast the server answers."""
    while True:
        await answer(engine, **sampling)


def version(number: int) -> HeldUpdate:
    from asyncflow_torch.reference import HuggingFacePolicy

    return HeldUpdate(number, HuggingFacePolicy(one_server.model()).tensors(number))


def call_now(url: str, path: str, key: str, body: Any) -> bytes:
    server = HttpServer(url, key, url, health="/model_info")
    return bytes(server.wait_for(server.client.post(path, body, object)))


def call(shared: Any, path: str, **body: Any) -> Any:
    """What the server answers to a call of somebody else."""
    return json.loads(call_now(shared.url, path, os.environ[shared.options["key_env"]], body) or b"null")


def checksum(shared: Any) -> str:
    """Of all weights, as the server computes it from what it holds."""
    return str(call(shared, "/weights_checker", action="checksum")["per_engine_checksum"])


# ---- requests


@pytest.mark.parametrize(("length", "n", "found"), [(100, 4, 99), (24, 4, 23)])
def test_a_prompt_is_read_once_for_its_group_where_that_saves_something(
    shared: Any, length: int, n: int, found: int
) -> None:
    prompt = np.random.default_rng(length).integers(3, 42, length)

    with HttpGate(shared.url) as gate:
        with_engine(lambda engine: answer(engine, prompt, n=n), url=gate.url)

    replies = [json.loads(raw) for path, raw in gate.seen if path == "/generate"]
    cached = [each["meta_info"]["cached_tokens"] for each in replies if each["meta_info"]["completion_tokens"] > 1]
    assert cached == [found] * n, "the last token is read for what comes behind it"


@pytest.mark.parametrize(
    ("prompt", "sampling", "why"),
    [
        ([], {}, "one token or more"),
        ([5, 320], {}, "token id 320"),
        ([-1], {}, "token id -1"),
        ([5] * 250, {}, "context is 256"),
    ],
)
def test_what_cannot_be_answered_is_refused_and_the_server_lives(
    shared: Any, prompt: list[int], sampling: dict[str, Any], why: str
) -> None:
    async def work(engine: Any) -> list[af.Completion]:
        with pytest.raises(af.EngineError, match=why):
            await answer(engine, prompt, **sampling)
        return await answer(engine)

    (got,) = with_engine(work)
    assert len(got.token_ids) == 8


def test_a_response_that_others_aborted_is_an_error_and_no_response(shared: Any) -> None:
    key = os.environ[shared.options["key_env"]]

    async def work(engine: Any) -> None:
        running = asyncio.create_task(ask_until_an_error(engine, max_tokens=240))
        await begun(engine)
        while not running.done():
            await asyncio.to_thread(call_now, shared.url, "/abort_request", key, {"abort_all": True})
        with pytest.raises(af.EngineError, match="nobody interrupted"):
            await running

    with_engine(work)


# ---- weights


def test_what_the_server_holds_is_what_came_and_again_what_was(shared: Any, tmp_path: Path) -> None:
    def seen() -> Any:
        return checksum(shared), [
            (file.stat().st_ino, file.stat().st_size) for file in tmp_path.rglob("*.safetensors")
        ]

    async def work(engine: Any) -> list[Any]:
        found = [seen()]
        for number in (1, 2, 1):
            await engine.load_weights(version(number))
            found.append(seen())
        return found

    zero, one, two, again = with_engine(work, directory=str(tmp_path))

    assert one == again
    assert len({zero[0], one[0], two[0]}) == 3
    assert one[1] == two[1], "the memory of a version is used again for the next one"

    async def begins(engine: Any) -> str:
        return checksum(shared)

    assert with_engine(begins) == zero[0], (
        "an engine that attaches finds the folder's weights, whoever was there before"
    )


def test_a_version_goes_by_a_file_and_nothing_that_runs_is_aborted(shared: Any) -> None:
    async def work(engine: Any) -> af.Completion:
        running = asyncio.create_task(answer(engine, max_tokens=200))
        await begun(engine)
        del gate.seen[:]
        await engine.load_weights(version(1))
        paths.extend(path for path, _ in gate.seen if path != "/generate")
        return (await running)[0]

    paths: list[str] = []
    with HttpGate(shared.url) as gate:
        got = with_engine(work, url=gate.url)

    assert paths == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
    assert got.finish_reason in ("length", "stop")
    assert [span.version for span in got.spans] in ([0, 1], [1]), got.spans


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight: missing"),
        (lambda t: t.update(extra=np.zeros(3, np.float32)), "extra: the model has no such weight"),
        (
            lambda t: t.update({"model.norm.weight": np.ones(64, np.float64)}),
            r"float64\[64\], the server takes float32\[64\]",
        ),
    ],
)
def test_what_does_not_fit_never_comes_to_the_server(shared: Any, change: Callable[[Any], Any], why: str) -> None:
    from asyncflow_torch.reference import HuggingFacePolicy

    tensors = dict(HuggingFacePolicy(one_server.model()).tensors(1))
    change(tensors)

    async def work(engine: Any) -> tuple[str, str]:
        before = checksum(shared)
        with pytest.raises(af.WeightMismatch, match=why):
            await engine.load_weights(HeldUpdate(1, tensors))
        await answer(engine)
        return before, checksum(shared)

    before, after = with_engine(work)
    assert before == after


def test_after_a_load_that_nobody_knows_the_end_of_nothing_is_generated_until_one_is_whole(shared: Any) -> None:
    async def work(engine: Any) -> af.Completion:
        running = asyncio.create_task(ask_until_an_error(engine, max_tokens=240))
        await begun(engine)
        gate.lose.add("/update_weights_from_disk")
        with pytest.raises(af.AsyncFlowError):
            await engine.load_weights(version(1))
        gate.lose.clear()
        for what in (running, answer(engine), engine.logprobs([[5]], [[6]])):
            with pytest.raises(af.EngineError, match="did not come whole"):
                await what
        await engine.load_weights(version(2))
        return (await answer(engine))[0]

    with HttpGate(shared.url) as gate:
        got = with_engine(work, url=gate.url)

    assert {span.version for span in got.spans} == {2}


def test_a_server_that_hangs_is_named_and_nobody_waits_for_ever(shared: Any) -> None:
    async def work(engine: Any) -> None:
        gate.hold.add("/generate")
        with pytest.raises(EngineGone, match="POST /generate.* has not answered in 1 s"):
            await answer(engine)

    with HttpGate(shared.url) as gate:
        with_engine(work, url=gate.url, request_s=1.0)


# ---- who may use a server


def test_one_server_is_one_engines(shared: Any) -> None:
    async def work(engine: Any) -> None:
        with pytest.raises(af.ConfigError, match="another engine of this host"):
            one_server.attached(one_server.model())

    with_engine(work)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"url": "http://203.0.113.1:30000"}, "another host, and there is no key"),
        ({"url": "127.0.0.1:30000"}, "is not like"),
        ({"key_env": "NO_SUCH_KEY"}, "not set"),
        ({"url": "http://127.0.0.1:1"}, "cannot be reached"),
        ({"server": {"tp_size": 2}}, "runs already"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused_with_the_reason(
    shared: Any, options: dict[str, Any], why: str
) -> None:
    from asyncflow_sglang.server import SGLangServer

    with pytest.raises(af.AsyncFlowError, match=why):
        SGLangServer(one_server.model(), **{"url": shared.url, **options})


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"hidden_size": 128}, r"lm_head.weight: \[320, 128\] in the folder, \[320, 64\] in the server's model"),
        ({"num_hidden_layers": 3}, r"model.layers.2\S+: the server's model has no such weight"),
        ({"num_hidden_layers": 1}, r"model.layers.1\S+: the folder has no such weight"),
    ],
)
def test_a_server_of_another_model_is_refused_before_it_is_touched(
    shared: Any, tmp_path: Path, other: dict[str, Any], why: str
) -> None:
    from asyncflow_sglang.server import SGLangServer
    from asyncflow_torch.reference import tiny_model

    with_engine(lambda engine: engine.load_weights(version(1)))
    before = checksum(shared)

    with pytest.raises(af.ConfigError, match=rf"(?s)another model.*nothing in it was touched.*{why}"):
        SGLangServer(tiny_model(tmp_path / "other", vocab_size=320, **other), **shared.options)

    assert checksum(shared) == before


def test_nobody_uses_a_server_without_its_key(shared: Any) -> None:
    from asyncflow_sglang.server import SGLangServer

    with pytest.raises(af.EngineError, match="401"):
        SGLangServer(one_server.model(), url=shared.url)


# ---- servers that end, and workers


def test_a_server_of_its_own_that_dies_is_named_with_the_end_of_its_log(
    shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test of the shared server: an engine takes it for the one that it has started, and it is gone."""
    from asyncflow_sglang import server

    monkeypatch.setattr(server, "SGLangProcess", lambda *_: shared.process)
    monkeypatch.setattr(server, "free_port", lambda: int(shared.url.rpartition(":")[2]))
    monkeypatch.setattr(server.secrets, "token_hex", lambda _: os.environ[shared.options["key_env"]])

    async def dies(engine: Any) -> None:
        running = asyncio.create_task(ask_until_an_error(engine, n=2, max_tokens=240))
        await begun(engine)
        os.killpg(shared.process.pid, signal.SIGKILL)
        why = r"(?s)of this worker.*ended with signal SIGKILL; the end of its log:\n.*loading shards"
        with pytest.raises(EngineGone, match=why):
            await running
        with pytest.raises(EngineGone):
            await answer(engine)
        with pytest.raises(EngineGone):
            await engine.load_weights(version(2))

    with asyncio.Runner() as runner:
        engine = server.SGLangServer(one_server.model(), **one_server.OWN, request_s=60.0, update_s=60.0)
        try:
            runner.run(asyncio.wait_for(dies(engine), 200))
        finally:
            runner.run(engine.close())


def test_a_server_that_cannot_start_says_why() -> None:
    from asyncflow_sglang.server import SGLangServer

    with pytest.raises(af.EngineError, match=r"(?s)did not start: it ended with status \d.*no-such-option"):
        SGLangServer(one_server.model(), server={"no_such_option": 1})
