"""Several rewards with weights, coroutines, and a service behind HTTP that fails, waits and lies."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from echo_runs import echo_workflow, events_of
from functions import length
from judges import Judge

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.workflow import rewards
from asyncflow_sdk.workflow.loops import user_code
from asyncflow_sdk.workflow.loops.user_code import ServiceAway
from asyncflow_sdk.workflow.work import as_trl, is_of_trl, needs_of


def even(prompt_ids: Any) -> list[float | None]:
    """Scores prompts of an even length only."""
    return [1.0 if len(row) % 2 == 0 else None for row in prompt_ids]


async def slow(response_ids: Any, groups: Any) -> list[float]:
    assert len(groups) == len(response_ids)
    await asyncio.sleep(0)
    return [2.0] * len(response_ids)


def alarmed(response_ids: Any) -> list[float]:
    """A verifier with a limit of its own; only a main thread may set one."""
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(60)
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    return [0.0] * len(response_ids)


def of_trl(completion_ids: list[list[int]], kind: list[str], **columns: Any) -> list[float]:
    assert set(columns) >= {"prompt_ids", "number"}
    assert all(isinstance(values, list) for values in columns.values())
    return [float(len(ids)) if each == "a" else 0.0 for ids, each in zip(completion_ids, kind, strict=True)]


def nothing(response_ids: Any) -> list[None]:
    return [None] * len(response_ids)


def words(response_ids: Any) -> list[str]:
    return ["good"] * len(response_ids)


def test_rewards_are_summed_by_weight_and_each_is_kept_and_reported(tmp_path: Path) -> None:
    # given
    prompts = {
        "prompt_ids": [[1] * (each % 3 + 1) for each in range(16)],
        "kind": ["a", "b"] * 8,
        "number": range(16),
    }
    rewards = [length, (even, 0.5), (slow, 0.25), (alarmed, 1.0), (of_trl, 0.0)]
    workflow = echo_workflow(reward=rewards, prompts=prompts, steps=2)
    assert "function functions:length, test_rewards:even, test_rewards:slow, test_rewards:alarmed" in str(workflow)
    # when
    workflow.run(tmp_path / "run")
    # then
    for _, batch in af.read_steps(tmp_path / "run"):
        sizes = batch.ragged("response_ids").lengths
        pairs = batch.ragged("prompt_ids").lengths % 2 == 0
        np.testing.assert_array_equal(batch["reward_length"], sizes)
        np.testing.assert_array_equal(batch["reward_even"], np.where(pairs, 1.0, np.nan))
        np.testing.assert_array_equal(batch["reward_slow"], 2.0)
        assert 0 < np.count_nonzero(batch["reward_of_trl"]) < batch.rows
        np.testing.assert_allclose(batch["reward"], sizes + 0.5 * pairs + 0.5)
    metrics = [event["metrics"] for event in events_of(tmp_path / "run", "step")]
    assert all(
        each["reward_slow"] == 2 and each["reward_even"] == 1 and each["reward_length"] > 0 for each in metrics
    )
    pytest.importorskip("matplotlib")
    af.write_report(tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text()
    assert "reward even" in page
    assert "reward length" in page


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ([], "rewards need one or more functions"),
        ([length, length], "one or more functions, each once, not "),
        ([(length, "2")], r"a reward is a function, or a pair \(function, weight\), not \(<function length"),
        ([length, 3], "a reward is a function, or a pair"),
    ],
)
def test_lists_that_are_no_rewards_are_refused(reward: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        echo_workflow(reward=reward)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            [nothing, (even, 2.0)],
            r"no reward function scored a row: each returned None\nrow \d+ was given .*prompt_ids",
        ),
        ([length, words], r"words\(\) returned a reward that is text; it must be one number a row"),
    ],
)
def test_a_row_without_any_reward_ends_the_run_with_its_reason(tmp_path: Path, reward: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        echo_workflow(reward=reward, max_failed=0).run(tmp_path / "run")


# ---- names and signatures


def scaled(factor: float, response_ids: Any) -> list[float]:
    return [factor * len(ids) for ids in response_ids]


class Scale:
    def __call__(self, response_ids: Any) -> list[float]:
        return [0.0 for _ in response_ids]


def test_rewards_of_one_name_get_numbers() -> None:
    # given
    half, twice = functools.partial(scaled, 0.5), functools.partial(scaled, factor=2.0)
    several = [lambda response_ids: [0.0], lambda prompt_ids: [0.0], half, Scale(), Scale(), twice]
    # when
    workflow = echo_workflow(reward=several)
    # then
    (stage,) = workflow.plan.stages
    names = ["lambda", "lambda_2", "scaled", "scale", "scale_2", "scaled_2"]
    assert stage.gives == ("reward", *(f"reward_{name}" for name in names))
    assert stage.needs == ("response_ids", "prompt_ids")
    assert "test_rewards:scaled" in str(workflow)
    assert "signal.alarm needs a process of its own" in str(workflow)
    assert af.Stage(half).task == "scaled"
    services = [af.HttpReward("http://judge/score", needs=["response_ids"]) for _ in range(2)]
    assert echo_workflow(reward=services).plan.stages[0].gives == ("reward", "reward_http", "reward_http_2")


def trl_accuracy(prompts: list[Any], completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    return [0.0 for _ in completions]


def test_trl_functions_get_lists_by_their_names() -> None:
    assert is_of_trl(trl_accuracy)
    assert not is_of_trl(even)
    assert needs_of(trl_accuracy) == ("prompt", "response", "answer")
    texts = {"prompt": ["1+1="], "response": ["2"], "answer": np.array([2]), "level": ["easy"]}
    assert as_trl(texts) == {
        "prompts": ["1+1="], "completions": ["2"], "answer": [2], "level": ["easy"]
    }  # fmt: skip
    chat = [{"role": "user", "content": "1+1="}]
    given = as_trl({"prompt": [chat], "response": ["2"]})
    assert given == {"prompts": [chat], "completions": [[{"role": "assistant", "content": "2"}]]}


# ---- a service


@pytest.fixture
def other() -> Iterator[Judge]:
    made = Judge()
    yield made
    made.close()


def test_a_service_scores_a_run_beside_a_function(
    judge: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a service that fails at first in all ways that may pass
    monkeypatch.setenv("JUDGE_TOKEN", "secret")
    judge.script = [503, "hang up", 429, {"rewards": [None] * 16}]
    service = af.HttpReward(judge.url, needs=["response_ids"], name="judge", token_env="JUDGE_TOKEN")
    # when
    echo_workflow(reward=[(service, 2.0), even, slow], batch_size=16, steps=1).run(tmp_path / "run")
    # then
    ((_, batch),) = af.read_steps(tmp_path / "run")
    assert {"reward_judge", "reward_even", "reward_slow"} <= set(batch)
    assert set(judge.tokens) == {"Bearer secret"}
    assert "secret" not in (tmp_path / "run" / "workflow.json").read_text()
    assert list(judge.bodies[0]) == ["response_ids"]


def test_what_will_not_pass_is_raised_with_its_reason(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = functools.partial(globals()["ask"], judge.url)
    assert ask() == [2.0, 1.0]
    judge.script = [404]
    with pytest.raises(ConfigError, match="refused the rewards: .*404"):
        ask()
    judge.script = [b"no json"]
    with pytest.raises(ConfigError, match="answered with no list of rewards: .*b'no json'"):
        ask()
    judge.script = [{"rewards": ["good"]}]
    with pytest.raises(ConfigError, match="answered with no list of rewards: Expected `float"):
        ask()
    judge.script = [[1.0]]
    with pytest.raises(ConfigError, match="answered with 1 rewards for 2 rows"):
        ask()
    monkeypatch.setattr(rewards, "ANSWER_BYTES", 1 << 20)
    judge.script = [b" " * ((1 << 20) + 1)]
    with pytest.raises(ConfigError, match="answered with more than 1 MiB"):
        ask()
    with pytest.raises(ServiceAway, match="needs a token, and the variable NO_TOKEN is not set"):
        ask(token_env="NO_TOKEN")
    for url in ("file:///etc/passwd", "http://"):
        with pytest.raises(ConfigError, match=f"a reward service has a URL of http or https, not '{url}'"):
            af.HttpReward(url)


def ask(url: str, rows: Any = ((1, 2), (3,)), **options: Any) -> list[float | None]:
    return asyncio.run(af.HttpReward(url, needs=["response_ids"], **options)(response_ids=rows))


def drip(part: bytes, then: bytes, handler: Any) -> None:
    """Send without end, and never as slowly as the limit of an attempt."""
    with contextlib.suppress(OSError):
        handler.wfile.write(part)
        while not handler.server.released.wait(0.02):
            handler.wfile.write(then)


def cut(head: bytes, reset: bool, handler: Any) -> None:
    """Close the connection within an answer."""
    handler.wfile.write(head + b"[1.0, 2.")
    if reset:
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()


@pytest.mark.parametrize(
    "answer",
    [
        lambda handler: handler.server.released.wait(60),
        functools.partial(drip, b"HTTP/1.1 200 OK\r\n", b"X: 1\r\n"),
        functools.partial(drip, b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n", b" "),
    ],
    ids=["silence", "slow headers", "slow body"],
)
def test_deadline_holds_against_slow_answers(judge: Judge, answer: Any) -> None:
    judge.script = [answer] * 100
    with pytest.raises(
        ConfigError, match=r"gave no rewards in [\d.]+ s and \d+ attempts: the answer was not complete"
    ):
        ask(judge.url, timeout_s=0.3, deadline_s=1.0)


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("length", [b"Content-Length: 10\r\n", b"", b"Transfer-Encoding: chunked\r\n"])
def test_incomplete_answer_is_retried(judge: Judge, length: bytes, reset: bool) -> None:
    judge.script = [functools.partial(cut, b"HTTP/1.1 200 OK\r\n" + length + b"\r\n", reset)]
    assert ask(judge.url) == [2.0, 1.0]
    assert len(judge.bodies) == 2


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_token_never_follows_a_redirect(
    judge: Judge, other: Judge, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def redirect(handler: Any) -> None:
        handler.send_response(status)
        handler.send_header("Location", other.url)
        handler.end_headers()

    monkeypatch.setenv("JUDGE_TOKEN", "secret\n")
    judge.script = [redirect]
    with pytest.raises(ConfigError, match=f"redirects to {other.url}, which is not followed"):
        ask(judge.url, token_env="JUDGE_TOKEN")
    assert (judge.tokens, other.requests) == (["Bearer secret"], 0)


def test_environment_proxy_serves_public_addresses_only(
    judge: Judge, other: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", other.url)
    assert ask(judge.url) == [2.0, 1.0]
    assert other.requests == 0
    assert ask("http://1.1.1.1/score") == ask("http://judge.invalid/score") == [2.0, 1.0]
    assert other.requests == 2
    monkeypatch.delenv("http_proxy")
    assert ask(judge.url, proxy=other.url) == [2.0, 1.0]
    assert (other.requests, judge.requests) == (3, 1)


def test_absent_service_ends_the_run_and_one_that_fails_for_some_rows_does_not(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a service that fails for all, or for the rows of one call
    async def call(service: af.HttpReward, *rows: list[int]) -> list[Any]:
        return await asyncio.gather(*(service(response_ids=[row]) for row in rows), return_exceptions=True)

    notes = list[str]()
    monkeypatch.setattr(user_code, "LAST_ATTEMPT", 2)
    judge.script = [503] * 100
    away = af.HttpReward(judge.url, needs=["response_ids"], deadline_s=1.0)
    away.watch.report_to(notes.append)
    # when
    failed = asyncio.run(call(away, [1], [2]))
    # then
    assert ServiceAway in map(type, failed)
    assert "away for 1 s: ConnectionError: 503" in str(failed)
    assert len(notes) == 1

    # given
    judge.script, judge.poison = [], [9]
    service = af.HttpReward(judge.url, needs=["response_ids"])

    async def others() -> list[Any]:
        poisoned = asyncio.ensure_future(call(service, [9]))
        while not poisoned.done():
            assert await service(response_ids=[[1]]) == [1.0]
        return await poisoned

    # when
    (failed,) = asyncio.run(others())
    # then
    assert type(failed) is ConfigError


def test_a_file_names_several_rewards(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        'steps = 1\nbatch_size = 4\nreward = ["functions:length", ["test_rewards:even", 0.5]]\n'
        'prompts = { prompt_ids = [[1], [2]] }\nrollout = { engine = "echo", prompt = "prompt_ids", group_size = 4 }\n'
        'train = { engine = "echo" }\n'
    )
    rewards: Any = af.load_workflow(tmp_path / "run.toml").plan.stages[0].work
    assert (rewards.names, rewards.weights) == (["reward_length", "reward_even"], (1.0, 0.5))
    (tmp_path / "run.toml").write_text((tmp_path / "run.toml").read_text().replace('"test_rewards:even"', "1"))
    with pytest.raises(ConfigError, match='reward.1: "module:function" is expected, or a list of it and a weight'):
        af.load_workflow(tmp_path / "run.toml")
