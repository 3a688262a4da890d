"""Durability "host" with the store "hosts": columns of each host are on its disk before their put or completion is
acknowledged, and outlive a power failure there."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attacked import NEAR, Attacked, values_of
from children import Child
from hosts import Cluster
from small_disk import small_disk

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, DeadlineExceeded
from benchmarks.hosts.network import unavailable

on_hosts = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "hosts can be made")


def begin(attacked: Attacked, **store: Any) -> list[Child]:
    return attacked.begin(durability="host", store={"directory": str(attacked.disk), **store})


def restart(attacked: Attacked, *hosts: int) -> None:
    """Power comes back on hosts: their memory is empty, and units find what is on their disks."""
    units = [attacked.unit(host) for host in hosts]
    for unit in units:
        assert "epoch 1, is served at" in unit.hear()


def damage(attacked: Attacked, host: int, number: int) -> None:
    """Change a byte of a row on the disk of a host."""
    value = values_of(number)["x"].tobytes()
    (path, at), *others = [
        (path, at) for path in attacked.folder_of(host).glob("h*!s*") if (at := path.read_bytes().find(value)) >= 0
    ]
    assert not others
    with open(path, "r+b") as file:
        file.seek(at + len(value) // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


@on_hosts
def test_a_host_that_loses_power_loses_no_row_but_those_with_damaged_bytes(attacked: Attacked) -> None:
    near, far = begin(attacked)
    # given rows and scores on the disk of one host
    for n in range(0, 9, 3):
        near(f"put({list(range(n, n + 3))}, key='{n}')")
    far(f"put({list(range(10, 14))})")
    scored = near("score(13)")
    trained = far("train(3)")
    assert not list(attacked.network.memory(NEAR).glob("*/h*!s*"))
    # when it loses power, and its disk a byte, and the server is killed meanwhile
    folder = attacked.folder_of(NEAR)
    attacked.network.kill(NEAR)
    victim = min(set(range(9)) - set(trained))
    damage(attacked, NEAR, victim)
    attacked.kill_server()
    restart(attacked, NEAR)
    # then what is left of the block with this byte is lost, by name
    block = {victim // 3 * 3 + n for n in range(3)}
    lost = sorted(block - set(trained))
    assert attacked.folder_of(NEAR) == folder
    ((key, (count, reasons)),) = attacked.server("failed()").items()
    assert (key, count) == (f"{min(block)}", len(lost))
    assert all("were found damaged after a restart" in reason for reason in reasons)
    # and all other rows are as they were written
    rest = sorted(set(scored) - set(trained) - block)
    assert sorted(far(f"train({len(rest)})")) == rest
    # and the lost ones can be put again
    again = attacked.client(NEAR)
    assert again.hear() == "connected"
    assert again(f"put({sorted(block)}, key='{min(block)}')") == len(lost)
    assert sorted(far(f"score({len(lost)})")) == sorted(again(f"train({len(lost)})")) == lost
    attacked.ended(consumed=13, failed=len(lost))


@on_hosts
def test_the_disk_of_a_host_is_full(attacked: Attacked) -> None:
    with small_disk(attacked.disk_of(NEAR), 40) as disk:
        near, far = begin(attacked)
        near(f"put({list(range(4))})")
        disk.fill()
        # then a put that does not fit waits for room, says so, and stores nothing
        many = list(range(100, 600))
        text = near(f"put({many}, timeout_s=1.0)")
        assert text.startswith("DeadlineExceeded: after ")
        assert "no room for" in text and str(attacked.disk) in text
        assert attacked.audit()["put"] == 4
        attacked.kill_server()
        # and what is there is read
        assert sorted(far("score(4)")) == sorted(far("train(4)")) == list(range(4))
        # and when there is room, a waiting put goes on
        near.say(f"put({many})")
        disk.free()
        assert near.hear() == 500
        assert sorted(far("score(500)")) == sorted(far("train(500)")) == many
        attacked.ended(consumed=504)


def test_a_put_counts_only_once_its_columns_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(tmp_path, store=af.Store(kind="hosts"), durability="host")
    with cluster.ends:
        cluster.unit("a")
        cluster.run.queue.declare("work", needs=["x"])
        producer = cluster.client("a")
        synced: list[int] = []
        sync, fails = os.fdatasync, True

        def fdatasync(fd: int) -> None:
            if str(tmp_path / "a") in os.readlink(f"/proc/self/fd/{fd}"):
                synced.append(cluster.run.audit().put)
                if fails:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            sync(fd)

        # when the disk fails
        monkeypatch.setattr(os, "fdatasync", fdatasync)
        with pytest.raises(DeadlineExceeded, match="cannot be synced: Input/output error"):
            producer.put({"x": np.arange(2)}, timeout_s=0.5)
        assert set(synced) == {0}
        # then nothing was put, and it is synced before it counts
        fails, synced[:] = False, []
        producer.put({"x": np.arange(3)})
        assert synced == [0]
        assert cluster.run.audit().put == 3
        cluster.run.queue.end(cancel=True)


def test_the_directory_is_an_absolute_path() -> None:
    with pytest.raises(ConfigError, match="absolute path, not 'columns'"):
        af.serve(store=af.Store(kind="hosts", options={"directory": "columns"}))
