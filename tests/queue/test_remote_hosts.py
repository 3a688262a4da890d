"""Two hosts: the queue across a cable that is long, that loses packets, that is cut and mended, and that is cut for good."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from children import Child
from host_children import ROWS, ask, serve, work
from two_hosts import HERE, Hosts, two_hosts

ADDRESS = f"tcp://{HERE}:7000"


@pytest.fixture(scope="module")
def all_hosts() -> Iterator[Hosts]:
    with two_hosts() as hosts:
        yield hosts


@pytest.fixture
def hosts(all_hosts: Hosts) -> Iterator[Hosts]:
    befall(all_hosts, delay_s=0.0, loss=0.0, cut=False)
    yield all_hosts
    befall(all_hosts, delay_s=0.0, loss=0.0, cut=False)


def befall(hosts: Hosts, **what: Any) -> None:
    hosts.link.say(what)
    assert hosts.link.hear() == "done"


def copied(directory: Path) -> str:
    """The key, as it was copied to the other host."""
    copy = directory.parent / f"{directory.name}.key"
    shutil.copy(directory / "run.key", copy)
    return str(copy)


def went_well(server: Child, parts: int) -> None:
    """Every row is there once, with its values, and everything of it was done once."""
    server.say("how did it go")
    count = parts * ROWS
    assert server.hear() == {"put": count, "consumed": count, "failed": 0, "before": count, "wrong": 0}


@pytest.mark.parametrize(
    ("befalls", "parts"),
    [({}, 4), ({"delay_s": 0.03}, 4), ({"delay_s": 0.004, "loss": 0.02}, 6)],
    ids=["plain", "delay", "loss"],
)
def test_work_goes_on_over_a_bad_cable(hosts: Hosts, tmp_path: Path, befalls: dict[str, float], parts: int) -> None:
    # given a server, and a worker on another host that sees none of its memory
    with Child(serve, str(tmp_path / "run"), ADDRESS, 10_000, parts, within=hosts.here) as server:
        assert server.hear() == ADDRESS
        befall(hosts, **befalls)
        # when
        with Child(work, ADDRESS, copied(tmp_path / "run"), 10_000, parts, within=hosts.there) as worker:
            assert worker.hear() == ["inline", True]
            for number in range(parts):
                assert worker.hear() == number
        # then
        befall(hosts, delay_s=0.0, loss=0.0)
        went_well(server, parts)


@pytest.mark.parametrize("give_up_ms", [60_000, 1000], ids=["the connection outlives it", "another is made"])
def test_a_cable_that_is_cut_and_mended(hosts: Hosts, tmp_path: Path, give_up_ms: int) -> None:
    # given a worker in the midst of its work
    parts = 12
    with Child(serve, str(tmp_path / "run"), ADDRESS, give_up_ms, parts, within=hosts.here) as server:
        server.hear()
        befall(hosts, delay_s=0.005)
        with Child(work, ADDRESS, copied(tmp_path / "run"), give_up_ms, parts, within=hosts.there) as worker:
            worker.hear()
            for number in range(3):
                assert worker.hear() == number
            # when
            befall(hosts, cut=True)
            time.sleep(2.5)
            befall(hosts, cut=False)
            # then it goes on, and nothing was lost or done twice
            for number in range(3, parts):
                assert worker.hear() == number
        went_well(server, parts)


def test_a_cable_that_is_cut_for_good(hosts: Hosts, tmp_path: Path) -> None:
    # given
    with Child(serve, str(tmp_path / "run"), ADDRESS, 60_000, 0, within=hosts.here) as server:
        server.hear()
        with Child(ask, ADDRESS, copied(tmp_path / "run"), within=hosts.there) as asker:
            assert asker.hear() == "connected"
            # when
            befall(hosts, cut=True)
            asker.say("ask")
            # then the deadline's error says who did not answer
            said = asker.hear()
        assert said.startswith(f"ServerLost: {ADDRESS} gave no answer in ")
        assert "does the network reach it?" in said
