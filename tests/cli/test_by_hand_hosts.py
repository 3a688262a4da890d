"""Runs by hand on two hosts: one serves and trains, the other generates and scores, with a copy of the run's key."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts_in_namespaces import HERE, Network, network
from test_by_hand import PROMPTS, Command

from asyncflow_sdk.wire import ensure_keys

ADDRESS = f"tcp://{HERE}:7000"
STEPS = 4


@pytest.fixture(scope="module")
def hosts() -> Iterator[Network]:
    with network(2) as made:
        yield made


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """A folder of the other host, with its user's module; ``tmp_path`` is the server's."""
    folder = tmp_path / "there"
    folder.mkdir()
    (folder / "mine.py").write_text(
        "def length(response_ids):\n    return [float(len(row)) for row in response_ids]\n"
    )
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps(row) for row in PROMPTS))
    return folder


def test_workers_of_another_host_join_by_one_command_each(hosts: Network, tmp_path: Path, there: Path) -> None:
    options = ["--prompts", "data.jsonl", "--column", "prompt_ids", "--group-size", "4", "--steps", str(STEPS)]
    serve = ["serve", "run", "--address", ADDRESS, *options]
    with Command(*serve, cwd=tmp_path, within=hosts.within(1)) as server:
        # given a run, its key copied to the other host, and a trainer beside the server, whose weights others must reach
        server.until(rf"asyncflow worker {ADDRESS} --key run.key train")
        server.until(r"asyncflow top")
        shutil.copy(tmp_path / "run" / "run.key", there / "run.key")
        rollout = ["rollout", "--engine", "echo", "--prompt", "prompt_ids"]
        reward = ["stage", "mine:length", "--task", "reward", "--gives", "reward"]
        train = ["--key", "run/run.key", "train", "--engine", "echo", "--batch-size", "16"]
        # when
        with (
            Command("worker", ADDRESS, *train, cwd=tmp_path, within=hosts.within(1)) as trainer,
            Command("worker", ADDRESS, "--key", "run.key", *rollout, cwd=there, within=hosts.within(2)) as far,
            Command("worker", ADDRESS, "--key", "run.key", *reward, cwd=there, within=hosts.within(2)) as stage,
        ):
            # then each ends by itself, with the stream, and the run with them
            ends = [each.end() for each in (trainer, far, stage)]
            assert ends == [0, 0, 0], trainer.said + far.said + stage.said
        assert server.end() == 0, server.said
    assert f"consumed={16 * STEPS}" in server.said
    assert "live=0" in server.said
    assert (there / "logs").is_dir(), "they log where they were started"


def test_without_the_key_nobody_of_another_host_is_let_in(hosts: Network, tmp_path: Path, there: Path) -> None:
    ensure_keys(there / "other.server.key", there / "other.key")
    with Command("serve", "run", "--address", ADDRESS, cwd=tmp_path, within=hosts.within(1)) as server:
        server.until(r"asyncflow top")
        join = ["stage", "mine:length", "--task", "reward"]
        for key, said in (([], "needs a key"), (["--key", "other.key"], "or others than this key is for")):
            with Command("worker", ADDRESS, *key, *join, cwd=there, within=hosts.within(2)) as stranger:
                assert stranger.end() == 2
                assert said in " ".join(stranger.said.split())
        assert server.process.poll() is None
