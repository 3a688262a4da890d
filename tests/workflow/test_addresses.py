"""A run is found by its directory for as long as it is served, and never after."""

from pathlib import Path

import pytest
from children import Child, hear, say
from waiting import in_thread

import asyncflow_sdk as af
from asyncflow_sdk.errors import ServerLost


def serve(directory: str) -> None:
    """Serve a run until killed."""
    with af.serve(directory):
        say("ready")
        hear()


def serve_durably(directory: str) -> None:
    """Serve a durable run, which has a row, until killed."""
    with af.serve(directory, address="tcp://127.0.0.1:0", durability="process") as run:
        if run.recovered is None:
            run.queue.put({"x": [1]})
        say(run.address)
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
        with pytest.raises(ServerLost, match=r"nobody listens at ipc://.*is the server running"):
            af.connect(tmp_path)
    af.serve(tmp_path).close()  # removes what the killed one left


@pytest.mark.parametrize("where", ["no such directory", "127.0.0.1:80", ""])
def test_what_is_neither_is_said_so(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(af.ConfigError, match="neither an address"):
        af.connect(where)


def test_where_nobody_listens_the_callers_own_deadline_counts() -> None:
    with pytest.raises(
        ServerLost, match=r"nobody listens at tcp://127.0.0.1:9, after 0\.2 s of waiting for a server"
    ):
        af.connect("tcp://127.0.0.1:9", timeout_s=0.2)


def test_a_durable_run_whose_server_was_killed_is_waited_for_until_it_is_over(tmp_path: Path) -> None:
    # given one whose server was killed
    with Child(serve_durably, str(tmp_path)) as child:
        address = child.hear()
        child.kill()
    waited = r"Its journal holds a durable run that is not over; nobody served .* again in 0\.2 s of waiting"
    with pytest.raises(ServerLost, match=rf"nobody listens at .*{waited}"):
        af.connect(tmp_path, timeout_s=0.2)
    # when others connect, by its directory and by its address, and it is served again
    joined = [in_thread(af.connect, where, timeout_s=60.0) for where in (tmp_path, address)]
    with af.serve(tmp_path, address=address) as run:
        # then they are let in
        assert run.recovered is not None
        for join in joined:
            other = join()
            assert isinstance(other, af.Run), other
            assert other.queue.audit().put == 1
            other.close()
    # and one that was closed with a row that nobody has read is waited for, too
    with pytest.raises(ServerLost, match=f"is not being served.*{waited}"):
        af.connect(tmp_path, timeout_s=0.2)
    # when it is over, that is told at once
    with af.serve(tmp_path) as run:
        run.queue.declare("work", needs=["x"])
        run.queue.get("work", timeout_s=30).ack()
        run.queue.end()
    with pytest.raises(af.ConfigError, match=r"is not being served.*has its run ended\?"):
        af.connect(tmp_path, timeout_s=3600.0)
