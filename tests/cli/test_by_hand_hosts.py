"""Runs by hand on two hosts: the other one is let in by a copy of the run's key. tests/test_typed.py has whole runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts_in_namespaces import HERE, Network, network
from test_by_hand import asyncflow

from asyncflow_sdk.wire import ensure_keys

ADDRESS = f"tcp://{HERE}:7000"


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
    return folder


def test_without_the_key_nobody_of_another_host_is_let_in(hosts: Network, tmp_path: Path, there: Path) -> None:
    ensure_keys(there / "other.server.key", there / "other.key")
    with asyncflow("serve", "run", "--address", ADDRESS, cwd=tmp_path, within=hosts.within(1)) as server:
        server.until(r"asyncflow top")
        join = ["stage", "mine:length", "--task", "reward"]
        for key, said in (([], "needs a key"), (["--key", "other.key"], "or others than this key is for")):
            with asyncflow("worker", ADDRESS, *key, *join, cwd=there, within=hosts.within(2)) as stranger:
                assert stranger.end() == 2
                assert said in " ".join(stranger.said.split())
        assert server.process.poll() is None
