"""What an SGLang server and its engine do to each other, where the conformance kit does not look."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import one_server
import pytest

import asyncflow_sdk as af
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
    """A request is on its way to the server."""
    while not any(asked.sent for asked in engine._asking._running):
        await asyncio.sleep(0)
    await asyncio.sleep(0)


def version(number: int) -> HeldUpdate:
    from asyncflow_torch.reference import HuggingFacePolicy

    return HeldUpdate(number, HuggingFacePolicy(one_server.model()).tensors(number))


async def checksum(engine: Any) -> str:
    """Of all weights, as the server computes it from what it holds."""
    told = await engine._calls.post("/weights_checker", {"action": "checksum"}, dict)
    return str(told["per_engine_checksum"])


# ---- requests


@pytest.mark.parametrize(("length", "n", "found"), [(100, 4, 99), (24, 4, 23)])
def test_a_prompt_is_read_once_for_its_group_where_that_saves_something(
    shared: Any, monkeypatch: pytest.MonkeyPatch, length: int, n: int, found: int
) -> None:
    from asyncflow_sglang import rollout

    cached = []
    completion = rollout.completion
    monkeypatch.setattr(
        rollout,
        "completion",
        lambda reply, *a, **k: (cached.append(reply.meta_info.cached_tokens), completion(reply, *a, **k))[1],
    )
    prompt = np.random.default_rng(length).integers(3, 42, length)

    with_engine(lambda engine: answer(engine, prompt, n=n, temperature=1.0))

    assert cached == [found] * n, "the last token is read for what comes behind it"


@pytest.mark.parametrize(
    ("prompt", "sampling", "why"),
    [
        ([], {}, "one token or more"),
        ([5, 43], {}, "token id 43"),
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


def test_what_the_server_refuses_is_an_error_of_that_request_in_its_words(shared: Any) -> None:
    async def work(engine: Any) -> None:
        asked = engine._asking.ask({"input_ids": [5], "sampling_params": {"top_kk": 1}}, 1 << 16)
        with pytest.raises(af.EngineError, match="status 400: unknown field `top_kk`"):
            await asked.answer

    with_engine(work)


def test_an_answer_without_an_end_is_not_read_to_its_end(shared: Any) -> None:
    async def work(engine: Any) -> None:
        from asyncflow_sglang.requests import generate_body

        asked = engine._asking.ask(generate_body([5, 6, 7], af.Sampling(max_tokens=200)), 1000)
        with pytest.raises(af.EngineError, match="more than 1000 bytes"):
            await asked.answer

    with_engine(work)


def test_a_response_that_others_aborted_is_an_error_and_no_response(shared: Any) -> None:
    async def work(engine: Any) -> None:
        running = asyncio.create_task(answer(engine, max_tokens=240))
        await begun(engine)
        while not running.done():
            await engine._calls.post("/abort_request", {"abort_all": True}, object)
        with pytest.raises(af.EngineError, match="nobody interrupted"):
            await running

    with_engine(work)


# ---- weights


def test_what_the_server_holds_is_what_came_and_again_what_was(shared: Any) -> None:
    async def work(engine: Any) -> list[str]:
        sums = [await checksum(engine)]
        for number in (1, 2, 1):
            await engine.load_weights(version(number))
            sums.append(await checksum(engine))
        return sums

    zero, one, two, again = with_engine(work)

    assert one == again
    assert len({zero, one, two}) == 3
    assert with_engine(checksum) == zero, (
        "an engine that attaches finds the folder's weights, whoever was there before"
    )


def test_a_version_goes_by_a_file_and_nothing_that_runs_is_aborted(
    shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(engine: Any) -> tuple[list[str], af.Completion]:
        paths = []
        post = engine._calls.post
        running = asyncio.create_task(answer(engine, max_tokens=200))
        await begun(engine)

        def told(path: str, *a: Any, **k: Any) -> Any:
            paths.append(path)
            return post(path, *a, **k)

        monkeypatch.setattr(engine._calls, "post", told)
        await engine.load_weights(version(1))
        return [path for path in paths if path != "/generate"], (await running)[0]

    paths, got = with_engine(work)

    assert paths == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
    assert got.finish_reason == "length"
    assert [span.version for span in got.spans] in ([0, 1], [1]), got.spans


def test_memory_of_a_version_is_used_again_for_the_next(shared: Any) -> None:
    def file(engine: Any) -> tuple[int, int]:
        (only,) = engine._handing.folder.glob("*.safetensors")
        return only.stat().st_ino, only.stat().st_size

    async def work(engine: Any) -> list[tuple[int, int]]:
        files = []
        for number in (1, 2, 3):
            await engine.load_weights(version(number))
            files.append(file(engine))
        return files

    assert len(set(with_engine(work))) == 1


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
        before = await checksum(engine)
        with pytest.raises(af.WeightMismatch, match=why):
            await engine.load_weights(HeldUpdate(1, tensors))
        await answer(engine)
        return before, await checksum(engine)

    before, after = with_engine(work)
    assert before == after


def test_after_a_load_that_nobody_knows_the_end_of_nothing_is_generated_until_one_is_whole(
    shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(engine: Any) -> af.Completion:
        post = engine._calls.post

        async def lost(path: str, *a: Any, **k: Any) -> Any:
            if path == "/update_weights_from_disk":
                raise EngineGone("no answer")
            return await post(path, *a, **k)

        running = asyncio.create_task(answer(engine, max_tokens=240))
        await begun(engine)
        with monkeypatch.context() as patched:
            patched.setattr(engine._calls, "post", lost)
            with pytest.raises(EngineGone):
                await engine.load_weights(version(1))
        for what in (running, answer(engine), engine.logprobs([[5]], [[6]])):
            with pytest.raises(af.EngineError, match="did not come whole"):
                await what
        await engine.load_weights(version(2))
        return (await answer(engine))[0]

    got = with_engine(work)

    assert {span.version for span in got.spans} == {2}


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
        ({"hidden_size": 128}, r"lm_head.weight: \[43, 128\] in the folder, \[43, 64\] in the server"),
        ({"num_hidden_layers": 3}, r"model.layers.2\S+: the server's model has no such weight"),
        ({"num_hidden_layers": 1}, r"model.layers.1\S+: the folder has no such weight"),
    ],
)
def test_a_server_of_another_model_is_refused_before_it_is_touched(
    shared: Any, tmp_path: Path, other: dict[str, Any], why: str
) -> None:
    from asyncflow_http.finding import call_now
    from asyncflow_sglang.server import SGLangServer
    from asyncflow_torch.reference import tiny_model

    with_engine(lambda engine: engine.load_weights(version(1)))
    key = os.environ[shared.options["key_env"]]
    before = call_now(shared.url, "/weights_checker", key, {"action": "checksum"})

    with pytest.raises(af.ConfigError, match=rf"(?s)another model.*nothing in it was touched.*{why}"):
        SGLangServer(tiny_model(tmp_path / "other", **other), **shared.options)

    assert call_now(shared.url, "/weights_checker", key, {"action": "checksum"}) == before


def test_nobody_uses_a_server_without_its_key(shared: Any) -> None:
    from asyncflow_sglang.server import SGLangServer

    with pytest.raises(af.EngineError, match="401"):
        SGLangServer(one_server.model(), url=shared.url)


# ---- servers that end, and workers


@pytest.fixture
def engine() -> Iterator[Any]:
    """With a server of its own, and an event loop to use it in: engine, run."""
    from asyncflow_sglang.server import SGLangServer

    with asyncio.Runner() as runner:
        made = SGLangServer(one_server.model(), **one_server.OWN, request_s=20.0, update_s=20.0)
        try:
            yield made, runner.run
        finally:
            runner.run(made.close())


def test_a_server_that_hangs_and_one_that_dies_are_named_and_nobody_waits_for_ever(engine: Any) -> None:
    made, run = engine

    async def hangs() -> None:
        made._asking._timeout_s = made._update_s = 2.0
        os.killpg(made._process.pid, signal.SIGSTOP)
        with pytest.raises(EngineGone, match="POST /generate.* has not answered in 2 s"):
            await answer(made)
        with pytest.raises(EngineGone, match="pause_generation.* has not answered in 2 s"):
            await made.load_weights(version(1))
        made._asking._timeout_s = made._update_s = 60.0
        os.killpg(made._process.pid, signal.SIGCONT)
        await made.load_weights(version(1))

    async def dies() -> None:
        running = asyncio.create_task(answer(made, n=2, max_tokens=240))
        await begun(made)
        os.killpg(made._process.pid, signal.SIGKILL)
        why = r"(?s)of this worker.*ended with signal SIGKILL; the end of its log:\n.*context_length"
        with pytest.raises(EngineGone, match=why):
            await running
        with pytest.raises(EngineGone):
            await answer(made)
        with pytest.raises(EngineGone):
            await made.load_weights(version(2))

    run(asyncio.wait_for(hangs(), 200))
    run(asyncio.wait_for(dies(), 200))


def test_a_server_ends_with_its_worker_however_that_ends(tmp_path: Path) -> None:
    code = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
import one_server
from asyncflow_sglang.server import SGLangServer
if __name__ == "__main__":
    engine = SGLangServer({one_server.model()!r}, **one_server.OWN)
    print(engine._process.pid, engine._handing.folder, flush=True)
    time.sleep(600)
"""
    (tmp_path / "worker.py").write_text(code)
    with subprocess.Popen([sys.executable, str(tmp_path / "worker.py")], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        group, _ = worker.stdout.readline().split()
        from asyncflow_sglang.launch import in_group, shared_memory

        files = shared_memory(in_group(int(group)))
        worker.kill()
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            os.killpg(int(group), 0)
        except ProcessLookupError:
            break
        time.sleep(0.05)
    else:
        pytest.fail("the server lives")
    assert files
    assert not [file for file in files if os.path.exists(file)]


def test_a_server_that_cannot_start_says_why() -> None:
    from asyncflow_sglang.server import SGLangServer

    with pytest.raises(af.EngineError, match=r"(?s)did not start: it ended with status \d.*no-such-option"):
        SGLangServer(one_server.model(), server={"no_such_option": 1})
