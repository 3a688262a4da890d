"""Several rewards with weights, coroutines, and a service behind HTTP that fails, waits and lies."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from echo_runs import echo_workflow, events_of
from functions import length

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, WorkerFailed


def even(prompt_ids: Any) -> list[float | None]:
    """Scores prompts of an even length only."""
    return [1.0 if len(row) % 2 == 0 else None for row in prompt_ids]


async def slow(response_ids: Any, groups: Any) -> list[float]:
    assert len(groups) == len(response_ids)
    await asyncio.sleep(0)
    return [2.0] * len(response_ids)


def nothing(response_ids: Any) -> list[None]:
    return [None] * len(response_ids)


def words(response_ids: Any) -> list[str]:
    return ["good"] * len(response_ids)


def test_rewards_are_summed_by_weight_and_each_is_kept_and_reported(tmp_path: Path) -> None:
    # given
    workflow = echo_workflow(reward=[length, (even, 0.5), (slow, 0.25)], steps=2)
    assert "function functions:length, test_rewards:even, test_rewards:slow" in str(workflow)
    # when
    workflow.run(tmp_path / "run")
    # then
    for _, batch in af.read_steps(tmp_path / "run"):
        sizes = batch.ragged("response_ids").lengths
        pairs = batch.ragged("prompt_ids").lengths % 2 == 0
        np.testing.assert_array_equal(batch["reward_length"], sizes)
        np.testing.assert_array_equal(batch["reward_even"], np.where(pairs, 1.0, np.nan))
        np.testing.assert_array_equal(batch["reward_slow"], 2.0)
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
        ([length, length], "of different names; twice: reward_length"),
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
        ([nothing, (even, 2.0)], r"no reward function scored row \d+: each returned None, given .*prompt_ids"),
        ([length, words], r"words\(\) returned a reward that is text; it must be one number a row"),
    ],
)
def test_a_row_without_any_reward_ends_the_run_with_its_reason(tmp_path: Path, reward: Any, message: str) -> None:
    with pytest.raises(WorkerFailed, match=message):
        echo_workflow(reward=reward).run(tmp_path / "run")


# ---- a service


class Judge:
    """A service that answers as a list of scripts says, in turn, and then with the lengths."""

    def __init__(self) -> None:
        self.script: list[Any] = []
        self.bodies: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []
        self.released = threading.Event()
        judge = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                judge.bodies.append(body)
                judge.tokens.append(self.headers["Authorization"])
                answer = judge.script.pop(0) if judge.script else [float(len(row)) for row in body["response_ids"]]
                if answer == "hang":
                    judge.released.wait(60)
                    return
                if answer == "hang up":
                    self.connection.close()
                    return
                if isinstance(answer, int):
                    self.send_error(answer)
                    return
                text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: Any) -> None:
                """Keep quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/score"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def judge() -> Iterator[Judge]:
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


def test_what_will_not_pass_is_raised_with_its_reason(judge: Judge) -> None:
    def ask(**options: Any) -> list[float | None]:
        return asyncio.run(af.HttpReward(judge.url, needs=["response_ids"], **options)(response_ids=[[1, 2], [3]]))

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
    judge.script = ["hang"] * 100
    with pytest.raises(ConfigError, match=r"gave no rewards in 0.5 s and \d+ attempts: "):
        ask(timeout_s=0.1, deadline_s=0.5)
    with pytest.raises(ConfigError, match="a reward service has a URL of http or https, not 'file:///etc/passwd'"):
        af.HttpReward("file:///etc/passwd")


def test_a_file_names_several_rewards(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        'steps = 1\nbatch_size = 4\nreward = ["functions:length", ["test_rewards:even", 0.5]]\n'
        'prompts = { prompt_ids = [[1], [2]] }\nrollout = { engine = "echo", prompt = "prompt_ids", group_size = 4 }\n'
        'train = { engine = "echo" }\n'
    )
    rewards: Any = af.load_workflow(tmp_path / "run.toml").plan.stages[0].work
    assert (rewards.names, rewards.weights) == (["reward_length", "reward_even"], (1.0, 0.5))
    (tmp_path / "run.toml").write_text((tmp_path / "run.toml").read_text().replace('"test_rewards:even"', "1"))
    with pytest.raises(ConfigError, match='3:.*: reward.1 is "module:function", or a list of it and a weight'):
        af.load_workflow(tmp_path / "run.toml")
