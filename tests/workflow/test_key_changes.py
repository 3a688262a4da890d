"""Keys that are replaced during a run, and clients that are evicted: who goes on, and who is shut out where."""

import contextlib
import os
import shutil
import threading
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner
from waiting import in_thread, until

import asyncflow_sdk as af
from asyncflow_sdk.cli.app import app
from asyncflow_sdk.errors import AccessDenied, ConfigError, ProtocolError
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.queue import Connection
from asyncflow_sdk.queue import server as WAITS
from asyncflow_sdk.queue.protocol import Call, ClientHello, decode_result, encode
from asyncflow_sdk.queue.stores.unit import UnitConfig
from asyncflow_sdk.queue.unit_process import run_unit
from asyncflow_sdk.wire import (
    Client,
    Member,
    RunKey,
    Service,
    ServiceClient,
    generate_keys,
    own_key,
    router_sockets,
    service,
    sockets,
)
from asyncflow_sdk.workflow import Run


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with af.serve(tmp_path / "run", address="tcp://127.0.0.1:0") as served:
        served.queue.declare("work", needs=["x"])
        yield served


def copied(run: Run, tmp_path: Path) -> Path:
    """A copy of the key as it is now, for a client of another host."""
    copy = tmp_path / f"{len(list(tmp_path.iterdir()))}.key"
    shutil.copy(tmp_path / "run" / "run.key", copy)
    return copy


class Far(Run):
    """A client of another host: it has a copy of the key."""

    def __init__(self, run: Run, key: Path | RunKey, name: str = "far") -> None:
        self.link = Connection(run.address, name, key=key, shared_memory=False, timeout_s=20)
        super().__init__(self.link)

    def reconnect(self) -> None:
        """What it asks next goes over a new connection."""
        self.link.wire.use_key(self.link.key)


def test_connected_clients_go_on_after_a_rotation_and_new_ones_need_the_new_key(run: Run, tmp_path: Path) -> None:
    # given
    old = copied(run, tmp_path)
    with Far(run, old) as client:
        client.queue.put({"x": np.arange(3.0)})
        # when
        run.rotate_key()
        # then a connected client goes on, over new connections and from new threads, too
        client.queue.put({"x": np.arange(3.0)})
        client.reconnect()
        in_thread(client.queue.put, {"x": np.arange(3.0)})()
        with client.queue.get("work", 9, timeout_s=20) as batch:
            batch.ack()
        # and the old key opens nothing
        with pytest.raises(AccessDenied, match=r"does not accept this key; ask for its run\.key"):
            Far(run, old)
        # and the new one does; clients of this host find it
        with Far(run, copied(run, tmp_path)), af.connect(run.address):
            pass
        # and a client may rotate, by command, too; it needs no key here
        client.rotate_key()
        done = CliRunner().invoke(app, ["keys", "rotate", str(tmp_path / "run")])
        assert done.exit_code == 0, done.output
        client.queue.put({"x": np.arange(3.0)})


def test_an_evicted_client_is_shut_out_of_every_socket(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "RECHECK_S", 0.05)
    with run.weight_publisher("tcp") as publisher:
        publisher.publish(0, {"w": np.zeros(1000)}).wait(30)
        # given two clients with the same copy of the key, which know where weights are
        key = copied(run, tmp_path)
        with Far(run, key, "good") as good:
            with contextlib.suppress(ProtocolError), Far(run, key, "bad") as bad, Far(run, key, "bad") as second:
                updates = bad.weight_updates(timeout_s=30)
                assert next(iter(updates)).version == 0
                where, own = weights_service(good), bad.link.key
                still_there = Client(run.address, own)
                assert "send hello first" in str(decode_result(still_there.request(encode(Call(None)), 20)).error)
                bad.queue.put({"x": np.zeros(1)})
                reads, others = ServiceClient(where, own), ServiceClient(where, good.link.key)
                reads.greet(20, "weights")
                others.greet(20, "weights")
                # when
                run.evict(bad.session, second.session)
                # then the next request of each of its sessions is refused
                for session in (bad, second):
                    with pytest.raises((ProtocolError, AccessDenied)):
                        session.rotate_key()
                # and the connections that it has to the publisher are, too; others go on
                until(lambda: refused(reads), "the refusal of an open connection")
                assert not refused(others)
                # and so is its key at the server, the run's key that it knew, and its key at the publisher
                for known in (RunKey.load(key), own):
                    with pytest.raises(AccessDenied):
                        Far(run, known)
                with pytest.raises(AccessDenied):
                    ServiceClient(where, own).greet(20, "weights")
                # and over a connection that it still has, it cannot join again
                hello = ClientHello("again", 0, "", af.__version__, "", generate_keys().run.public)
                answer = decode_result(still_there.request(encode(Call(hello)), 20))
                assert answer.error is not None and answer.error[0] == "AccessDenied"
                still_there.close()
            # and the other client goes on
            good.reconnect()
            good.queue.put({"x": np.zeros(1)})
            ServiceClient(where, good.link.key).greet(20, "weights")


def refused(client: ServiceClient) -> bool:
    """True if the service accepts no request over a connection any more."""
    try:
        client.greet(20, "weights")
    except AccessDenied:
        return True
    return False


def test_an_eviction_holds_if_the_new_key_cannot_be_saved(run: Run, tmp_path: Path) -> None:
    with contextlib.suppress(ProtocolError), Far(run, copied(run, tmp_path)) as bad:
        # given a file that cannot be replaced
        old, file = copied(run, tmp_path), tmp_path / "run" / "run.key"
        file.unlink()
        file.mkdir()
        # when
        with pytest.raises(
            ConfigError, match=r"were evicted, and the key was replaced, but not saved: cannot write a key"
        ):
            run.evict(bad.session)
        # then
        with pytest.raises((ProtocolError, AccessDenied)):
            bad.queue.put({"x": np.zeros(1)})
        with pytest.raises(AccessDenied):
            Far(run, old)
        # and there is a key for new clients once it can be saved
        file.rmdir()
        run.rotate_key()
        with Far(run, copied(run, tmp_path)):
            pass


def dies_at_a_rotation(x: float) -> float:
    """Of the first worker: it dies once the key is replaced."""
    folder = Path(os.environ["KEYS_TEST"])
    if not (folder / "began").exists():
        (folder / "began").touch()
        until((folder / "rotated").exists, "the rotation")
        os._exit(1)
    return x


def test_workers_started_after_a_rotation_have_the_new_key(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEYS_TEST", str(tmp_path))
    with Far(run, copied(run, tmp_path)) as client:
        # given a client whose copy is old, and workers that it starts
        run.rotate_key()
        client.start(af.Stage(dies_at_a_rotation, task="y", needs=["x"], gives=["y"], max_restarts=9))
        client.queue.declare("end", needs=["y"])
        client.queue.put({"x": np.arange(3.0)})
        until((tmp_path / "began").exists, "a worker")
        # when the key is replaced, and then the worker is started again
        run.rotate_key()
        (tmp_path / "rotated").touch()
        # then
        with client.queue.get("end", 3, timeout_s=100) as batch:
            batch.ack()
        run.queue.end()


def test_strangers_neither_fill_a_service_with_questions_nor_shut_out_members(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (sockets, router_sockets):
        monkeypatch.setattr(module, "GIVE_UP_MS", 200)
    monkeypatch.setattr(service, "MAX_ASKED", 4)
    server, asked, member = threading.Event(), list[str](), own_key()

    def known(keys: Collection[str]) -> Collection[str]:
        asked.extend(keys)
        server.wait(100)
        return {member.public} & set(keys)

    class Anyone:
        def request(self, peer: str, ticket: int, body: bytes) -> None:
            served.answer(ticket, body)

        def gone(self, peer: str) -> None:
            pass

    served = Service("127.0.0.1", Anyone(), member=Member(own_key(), known))
    strangers = [ServiceClient(served.where, own_key()) for _ in range(8)]
    greeting = [in_thread(stranger.greet, 100, "a stranger") for stranger in strangers]
    until(lambda: len(asked) == service.ASK_THREADS, "the first questions")
    client = ServiceClient(served.where, member)
    answer = in_thread(client.call, b"good", 100)
    # when the server answers again
    server.set()
    # then
    assert answer().body == b"good"
    assert all(isinstance(greeted(), AccessDenied) for greeted in greeting)
    for each in (client, *strangers):
        each.close()
    served.close()


def weights_service(client: Run) -> bytes:
    """Where the newest version is fetched."""
    (part,) = client.queue.send(cmd.AwaitVersion(after=-1, timeout_s=20)).parts
    service: bytes = msgspec.msgpack.decode(part.where)[0]
    return service


def test_a_run_without_keys_has_none_to_replace(tmp_path: Path) -> None:
    with af.serve(tmp_path) as run, pytest.raises(ConfigError, match="this run has no keys"):
        run.rotate_key()


def test_rotating_while_a_version_is_published(run: Run, tmp_path: Path) -> None:
    with run.weight_publisher("tcp") as publisher, Far(run, copied(run, tmp_path)) as replica:
        updates = replica.weight_updates(timeout_s=60)
        for version in range(5):
            # when
            publishing = publisher.publish(version, {"w": np.full(100_000, version)})
            run.rotate_key()
            publishing.wait(30)
            # then
            update = next(iter(updates))
            with update:
                assert dict(update.arrays())["w"][0] == update.version


def test_a_restarted_server_knows_its_clients_and_the_newest_key(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with af.serve(directory, address="tcp://127.0.0.1:0", durability="process") as run:
        address, old = run.address, copied(run, tmp_path)
        run.queue.declare("work", needs=["x"])
        client = Far(run, old)
        run.rotate_key()
    # when the server had died after it wrote server.key, and before it wrote run.key
    shutil.copy(old, directory / "run.key")
    with af.serve(directory, address=address, durability="process") as run, client:
        # then
        client.queue.put({"x": np.zeros(1)})
        with pytest.raises(AccessDenied):
            Far(run, old)
        with Far(run, copied(run, tmp_path)):
            pass
        run.queue.end(cancel=True)


def test_storage_units_know_the_clients_of_the_run(tmp_path: Path) -> None:
    with af.serve(tmp_path / "run", address="tcp://127.0.0.1:0", store="hosts") as run:
        config = UnitConfig(run.address, key=RunKey.load(copied(run, tmp_path)))
        serving = in_thread(run_unit, config, lambda text: None, threading.Event(), beat_s=0.05)
        until(lambda: any(home.address for home in run.homes()), "a storage unit")
        # given clients that came before a rotation, and after it
        with Far(run, copied(run, tmp_path), "bad") as bad, contextlib.suppress(ProtocolError):
            run.rotate_key()
            with Far(run, copied(run, tmp_path), "good") as good:
                (home,) = run.homes()
                for client in (bad, good):
                    assert client.ping_home(home, 20) > 0
                # when
                run.evict(bad.session)
                # then
                with pytest.raises(AccessDenied):
                    bad.ping_home(home, 20)
                assert good.ping_home(home, 20) > 0
        run.queue.end(cancel=True)
    serving()


def test_a_unit_whose_session_has_ended_by_silence_joins_again_after_a_rotation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WAITS, "UNIT_SILENCE_S", 0.2)
    with af.serve(tmp_path / "run", address="tcp://127.0.0.1:0", store="hosts") as run:
        config = UnitConfig(run.address, key=RunKey.load(copied(run, tmp_path)))
        serving = in_thread(run_unit, config, lambda text: None, threading.Event(), beat_s=1.0)
        sessions = lambda: [each.id for each in run.queue.status().sessions if each.name == "store"]  # noqa: E731
        found: list[int] = []
        until(lambda: found.extend(sessions()) or found, "a storage unit")
        first = found[0]
        # when
        run.rotate_key()
        # then
        until(lambda: first not in sessions(), "the end of its session by silence")
        monkeypatch.setattr(WAITS, "UNIT_SILENCE_S", 60.0)
        served = lambda: [each.home for each in run.queue.status().homes if each.state == "served"]  # noqa: E731
        until(lambda: served()[:2] == [0, 1], "its home, served by its next session")
        run.queue.end(cancel=True)
    serving()
