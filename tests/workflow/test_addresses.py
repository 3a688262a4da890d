"""A run is found by its directory for as long as it is served, and never after."""

from pathlib import Path

import pytest
from children import Child, hear, say

import asyncflow_sdk as af
from asyncflow_sdk.errors import ServerLost


def serve(directory: str) -> None:
    """Serve a run until killed."""
    with af.serve(directory):
        say("ready")
        hear()


def test_a_run_is_found_by_its_directory(tmp_path: Path) -> None:
    # given
    with af.serve(tmp_path / "run") as run:
        run.queue.declare("work", needs=["x"])
        run.queue.put({"x": [1, 2, 3]})
        # when
        with af.connect(tmp_path / "run") as other, af.connect(str(tmp_path / "run")) as third:
            # then
            assert other.queue.audit().put == third.queue.audit().put == 3
    # and when it is over
    assert not (tmp_path / "run" / "address").exists()
    with pytest.raises(af.ConfigError, match=r"run is not being served.*has its run ended\?"):
        af.connect(tmp_path / "run")


def test_a_server_that_was_killed_is_said_so_at_once(tmp_path: Path) -> None:
    with Child(serve, str(tmp_path)) as child:
        assert child.hear() == "ready"
        af.connect(tmp_path).close()
        child.kill()
        with pytest.raises(ServerLost, match=r"nobody listens at ipc://.*its server has ended"):
            af.connect(tmp_path)
    af.serve(tmp_path).close()  # removes what the killed one left


@pytest.mark.parametrize("where", ["no such directory", "127.0.0.1:80", ""])
def test_what_is_neither_is_said_so(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(af.ConfigError, match="neither an address"):
        af.connect(where)


def test_where_another_serves_it_by_now_is_not_forgotten(tmp_path: Path) -> None:
    first = af.serve(tmp_path)
    with af.serve(tmp_path) as second:
        second.queue.declare("work", needs=["x"])
        first.close()
        with af.connect(tmp_path) as other:
            assert list(other.queue.status().rows) == ["work"]
    assert not (tmp_path / "address").exists()


def test_where_nobody_listens_the_callers_own_deadline_counts() -> None:
    with pytest.raises(
        ServerLost, match=r"tcp://127.0.0.1:9 gave no answer in 1\.\d s; .* does the network reach it"
    ):
        af.connect("tcp://127.0.0.1:9", timeout_s=1.0)
