"""The store "hosts" under attack: a run on three hosts, and what befalls its units, hosts, cables, memory and server.

Whatever it is: the books balance, each row ends once, losses are counted, nothing is trained twice, and all that is read
is what was written.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import msgspec
import pytest
from attacked import FAR, NEAR, PORT, SERVER, Attacked
from children import outcome, say
from processes import below
from small_disk import SmallDisk, small_disk
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.wire import RunKey, ensure_keys
from asyncflow_sdk.wire.keys import save
from benchmarks.hosts.network import unavailable

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "hosts can be made")


@pytest.mark.parametrize("server_dies", [False, True], ids=["alone", "with the server"])
def test_a_killed_unit_is_followed_by_another_at_another_address(attacked: Attacked, server_dies: bool) -> None:
    near, far = attacked.begin(durability="process")
    near(f"put({list(range(10))})")
    # given a reader that knows the unit's address
    trained = far("score(4)") and far("train(4)")
    home = attacked.home(NEAR)
    # when the unit is killed while the reader waits for rows
    attacked.units[NEAR].kill()
    until(lambda: attacked.absent(NEAR), "the home without a unit")
    far.say("score(6)")
    if server_dies:
        attacked.kill_server()
    listen = f"tcp://{attacked.network.address(NEAR)}:7111"
    assert (
        f"home {home['home']}, epoch {home['epoch']}, is served at {listen}"
        in attacked.unit(NEAR, listen=listen).hear()
    )
    # then another unit has lost nothing
    assert sorted(far.hear() + trained) == list(range(10))
    assert near(f"put({list(range(10, 14))})") == 4
    assert sorted(far("score(4)")) == list(range(10, 14))
    assert sorted(trained + far("train(10)")) == list(range(14))
    attacked.ended(consumed=14)
    assert attacked.server("failed()") == {}
    assert attacked.server("events") == []


@pytest.mark.parametrize("how", ["silent", "evicted", "evicted, and the server killed"])
def test_a_lost_host_costs_what_was_put_and_made_there_and_the_same_puts_bring_it_again(
    attacked: Attacked, how: str
) -> None:
    near, far = attacked.begin(durability="process")
    # given rows put on one host, and scored on the other
    far(f"put({list(range(8))}, key='epoch-0', group_size=1)")
    assert sorted(near("score(8)")) == list(range(8))
    trained = far("train(2)")
    near(f"put({list(range(10, 16))}, key='epoch-1', group_size=1)")
    # when that other host is lost
    attacked.network.kill(NEAR)
    if "killed" in how:
        attacked.kill_server()
    if how == "silent":
        until(lambda: attacked.absent(NEAR), "the home without a unit")
        attacked.server("queue.configure(home_silence_s=0.0)")
    else:
        attacked.evict(NEAR)
    until(lambda: attacked.audit()["failed"], "the loss of the home")
    attacked.server("queue.configure(home_silence_s=60.0)")
    # then what was put there and what was made there failed
    audit = attacked.audit()
    assert (audit["failed"], audit["consumed"], audit["live"], audit["put"]) == (12, 2, 0, 14)
    (lost,) = attacked.server("events")
    assert (lost["rows_failed"], lost["name"]) == (12, attacked.home(NEAR)["name"])
    failed = attacked.server("failed()")
    assert {key: entry[0] for key, entry in failed.items()} == {"epoch-0": 6, "epoch-1": 6}
    assert all("payload lost: home host2-" in reason for entry in failed.values() for reason in entry[1])
    if "killed" in how:
        attacked.kill_server()
    # when the lost rows are put again elsewhere, and the host is there again, with nothing
    assert far(f"put({list(range(8))}, key='epoch-0', group_size=1)") == 6
    assert far(f"put({list(range(10, 16))}, key='epoch-1', group_size=1)") == 6
    (again,) = attacked.populate(NEAR)
    assert attacked.home(NEAR)["epoch"] == 2
    # then all that was ever put is trained once
    scored = again("score(6)") + far("score(6)")
    trained += far("train(6)") + again("train(6)")
    assert sorted(trained) == [*range(8), *range(10, 16)]
    assert sorted(scored) == sorted(set(trained) - set(trained[:2]))
    attacked.ended(consumed=14, failed=12)


def test_a_step_with_rows_on_a_lost_host_is_trained_once_by_a_killed_server_too(attacked: Attacked) -> None:
    near, far = attacked.begin(durability="process", batch_rows=4)
    # given a trained step, and a leased one with a part of it read
    near(f"put({list(range(8))}, key='epoch-0')")
    far("score(8)")
    trained = far("begin_step()") + far("end_step()")
    held = far("begin_step()")
    # when the host of their rows is lost
    attacked.network.kill(NEAR)
    attacked.evict(NEAR)
    attacked.kill_server()
    # then the step cannot be acknowledged, and its rows failed
    assert far("end_step()").startswith("LeaseLost: ")
    assert attacked.server("failed()")["epoch-0"][0] == 4
    # and rows put again, and none that was trained, fill the next one
    assert far(f"put({list(range(8))}, key='epoch-0')") == 4
    rest = sorted(set(range(8)) - set(trained))
    assert sorted(far("score(4)")) == rest
    assert set(held) <= set(rest)
    assert sorted(far("begin_step()") + far("end_step()")) == rest
    attacked.ended(consumed=8, failed=4)


def test_a_unit_is_killed_under_a_leased_step_and_the_server_meanwhile(attacked: Attacked) -> None:
    near, far = attacked.begin(durability="process", batch_rows=4)
    near(f"put({list(range(4))})")
    near("score(2)")
    trained = far("begin_step()")
    near("score(2)")
    # when the unit with the columns is killed between two parts
    attacked.units[NEAR].kill()
    until(lambda: attacked.absent(NEAR), "the home without a unit")
    far.say("end_step()")
    attacked.kill_server()
    assert "epoch 1, is served at" in attacked.unit(NEAR).hear()
    # then the step goes on with the next unit
    assert sorted(trained + sorted(far.hear())) == list(range(4))
    attacked.ended(consumed=4)
    assert attacked.server("events") == []


@pytest.mark.parametrize("what", ["folder", "files", "files, and nobody is there to see it"])
def test_what_a_unit_serves_is_removed_under_it_and_the_server_is_killed(attacked: Attacked, what: str) -> None:
    near, far = attacked.begin(durability="process")
    near(f"put({list(range(4))}, key='epoch-0')")
    folder = attacked.folder_of(NEAR)
    # when
    signal_unit(attacked, signal.SIGSTOP)  # the next server is the first to know of the loss
    if "nobody" in what:
        attacked.units[NEAR].kill()
    if what == "folder":
        shutil.rmtree(folder)
    else:
        for path in folder.glob("h*!s*"):
            path.unlink()
    attacked.kill_server()
    signal_unit(attacked, signal.SIGCONT)
    # then its clients go on: without a directory the unit ends, and they write to the memory of the server
    if what == "folder":
        assert attacked.units[NEAR].hear() == "ended"
        assert near(f"put({list(range(4, 8))})") == 4
    # and once a unit is there, what was lost is known
    if what != "files":
        listen = f"tcp://{attacked.network.address(NEAR)}:7111"
        assert f"epoch 2, is served at {listen}" in attacked.unit(NEAR, listen=listen).hear()
    until(lambda: attacked.audit()["failed"], "the loss of its rows")
    assert attacked.server("failed()")["epoch-0"][0] == 4
    assert folder.exists() == (what != "folder")
    if what != "folder":
        assert near(f"put({list(range(4, 8))})") == 4
    assert near(f"put({list(range(4))}, key='epoch-0')") == 4
    assert sorted(far("score(8)")) == sorted(far("train(8)")) == list(range(8))
    attacked.ended(consumed=8, failed=4)


def signal_unit(attacked: Attacked, number: int) -> None:
    for pid in below(attacked.units[NEAR].pid):
        os.kill(pid, number)


@pytest.mark.parametrize("server_dies", [False, True], ids=["alone", "with the server"])
def test_the_cable_of_units_and_producers_is_cut(attacked: Attacked, server_dies: bool) -> None:
    near, far = attacked.begin(durability="process")
    near(f"put({list(range(8))})")
    trained = far("score(2)") and far("train(2)")
    # when the host that has the rows is cut off, while it puts more, and others want to read them
    attacked.network.cut(NEAR)
    near.say(f"put({list(range(8, 12))}, key='more')")
    far.say("score(10)")
    until(lambda: attacked.absent(NEAR), "the unit's silence")
    if server_dies:
        attacked.kill_server()
    else:
        until(lambda: connections(attacked, NEAR) == 0, "the end of connections")
    attacked.network.mend(NEAR)
    # then nothing was lost, and no row an attempt
    assert near.hear() == 4
    assert sorted(far.hear() + trained) == list(range(12))
    assert sorted(trained + far("train(10)")) == list(range(12))
    assert attacked.home(NEAR)["epoch"] == 1
    attacked.ended(consumed=12)
    assert attacked.server("failed()") == {}
    assert attacked.server("events") == []


def connections(attacked: Attacked, host: int) -> int:
    """Established connections of a host with the server."""
    pid = attacked.units[host].pid
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    server = f":{PORT:04X}"
    return sum(fields[3] == "01" for line in lines if (fields := line.split())[2].endswith(server))


@pytest.mark.parametrize("server_dies", [False, True], ids=["alone", "with the server"])
def test_a_consumer_with_a_cut_cable_costs_rows_no_attempt(attacked: Attacked, server_dies: bool) -> None:
    attacked.serve(durability="process")
    attacked.declare()
    near, far = attacked.populate(NEAR, FAR, patience_s=0.0 if server_dies else 1.0)
    near(f"put({list(range(6))})")
    near("score(6)")
    trained = far("train(2)")
    # given a consumer that has leased rows, and waits for their columns
    attacked.network.cut(NEAR)
    far.say("train(4)")
    until(lambda: attacked.server("queue.status().rows['train']['leased']"), "the lease")
    # when its own cable is cut, and the other mended
    attacked.network.cut(FAR)
    attacked.network.mend(NEAR)
    until(lambda: attacked.absent(FAR), "the unit's silence")
    if server_dies:
        attacked.kill_server()
    else:
        until(lambda: connections(attacked, FAR) == 0, "the end of connections")
    attacked.network.mend(FAR)
    # then
    assert sorted(far.hear() + trained) == list(range(6))
    attacked.ended(consumed=6)
    assert attacked.server("failed()") == {}


def test_the_memory_of_a_host_is_full_and_the_server_is_killed(attacked: Attacked) -> None:
    near, far = attacked.begin(durability="process")
    near(f"put({list(range(4))})")
    disk = SmallDisk(attacked.network.memory(NEAR))
    # when
    disk.fill()
    # then a put that does not fit says so, and stores nothing
    many = list(range(100, 600))
    assert near(f"put({many}, timeout_s=1.0)").startswith("MemoryFull: no room for")
    assert attacked.audit()["put"] == 4
    attacked.kill_server()
    # and what is there is read
    assert sorted(far("score(4)")) == sorted(far("train(4)")) == list(range(4))
    # and when there is room, it goes on
    disk.free()
    assert near(f"put({many})") == 500
    assert sorted(far("score(500)")) == sorted(far("train(500)")) == many
    attacked.ended(consumed=504)


def refused(directory: str) -> None:
    """Say why a run cannot be served."""
    say(outcome(lambda: af.serve(directory)))


def test_the_disk_of_the_server_is_full(attacked: Attacked, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 40) as disk:
        attacked.folder, attacked.key = disk.path, str(disk.path / "run" / "run.key")
        near, far = attacked.begin(durability="process")
        # when the journal finds no room
        disk.fill()
        for number in range(1000):
            put = f"put([{number}], key='{number}' + 300_000 * 'k')"
            if (answer := near(put)) != 1:
                break
        # then the put says why, while rows that are there are worked on
        assert answer.startswith("MemoryFull: the journal")
        assert "No space left on device" in answer
        rows = list(range(number))
        assert sorted(far(f"score({number})")) == rows
        # and a killed server is not followed by another, which says why, while clients wait
        live = attacked.audit()["live"]
        attacked.server.kill()
        far.say(f"train({number})")
        refusal = attacked.start(SERVER, refused, str(disk.path / "run")).hear()
        assert refusal.startswith("MemoryFull: no room to begin ")
        assert "No space left on device" in refusal
        # but when there is room, nothing is lost, and it is put
        disk.free()
        assert attacked.serve(**attacked.options) == {"rows": live, "differing": 0}
        assert sorted(far.hear()) == rows
        assert near(put) == 1
        assert far("score(1)") == far("train(1)") == [number]
        attacked.ended(consumed=number + 1)


def test_others_keys_open_nothing_and_change_nothing_of_a_killed_server_either(attacked: Attacked) -> None:
    near, far = attacked.begin(durability="process")
    near(f"put({list(range(4))})")
    before = attacked.audit(), attacked.server("run.homes()")
    # when units and clients come with keys of another run
    other, mixed = attacked.folder / "other.key", attacked.folder / "mixed.key"
    key = ensure_keys(attacked.folder / "server.key", other).run
    save(mixed, msgspec.structs.replace(key, server=RunKey.load(attacked.key).server))  # it knows this server
    strangers = [
        start(host, key=str(path))
        for path in (other, mixed)
        for host, start in ((NEAR, attacked.unit), (FAR, attacked.client))
    ]
    # then each is refused by name, also by the next server
    attacked.kill_server()
    for stranger in strangers:
        assert stranger.hear().startswith("AccessDenied: ")
    # and nothing has changed
    until(lambda: (attacked.audit(), attacked.server("run.homes()")) == before, "nothing but what was before")
    assert sorted(far("score(4)")) == sorted(far("train(4)")) == list(range(4))
    attacked.ended(consumed=4)


def test_an_evicted_epoch_is_refused_for_ever_by_a_killed_server_too(attacked: Attacked) -> None:
    near, far = attacked.begin(durability="process")
    near(f"put({list(range(6))}, key='epoch-0')")
    trained = far("score(2)") and far("train(2)")
    old = {path.name for path in attacked.folder_of(NEAR).glob("h*!*")}
    # when a host that cannot be reached is evicted, while it puts rows there, and others want to read some
    attacked.network.cut(NEAR)
    near.say(f"put({list(range(6, 9))})")
    far.say("score(3)")
    until(lambda: attacked.server("queue.status().rows['score']['leased']"), "the lease")
    attacked.evict(NEAR)
    attacked.kill_server()
    attacked.network.mend(NEAR)
    # then its unit begins anew, with the rows that were on their way
    until(lambda: attacked.home(NEAR)["epoch"] == 2, "the next epoch")
    assert near.hear() == 3
    assert sorted(far.hear()) == [6, 7, 8]
    assert sorted(far("train(3)")) == [6, 7, 8]
    until(lambda: not old & set(os.listdir(attacked.folder_of(NEAR))), "the end of the old files")
    # and what was lost may be put again, but not what was trained
    assert attacked.server("failed()")["epoch-0"][0] == 4
    assert near(f"put({list(range(6))}, key='epoch-0')") == 4
    rest = sorted(set(range(6)) - set(trained))
    assert sorted(far("score(4)")) == sorted(far("train(4)")) == rest
    attacked.ended(consumed=9, failed=4)
