"""Who may write into a path of version directories: one publisher, of one run; nothing half-written counts or stays."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from children import Child, hear, say
from safetensors.numpy import load_file as load_numpy
from small_disk import small_disk
from transport_ends import FIRST, names, publish_and_stay, publishing, tensors

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, MemoryFull
from asyncflow_sdk.interfaces import Host
from asyncflow_sdk.testing.transport_harness import TransportHarness
from asyncflow_sdk.weights import make_transport


def test_what_a_killed_publisher_left_half_written_goes(path: Path) -> None:
    # given versions of a publisher that is gone: a whole one that is kept, one that is not, and halves of others
    with publishing(path, "one") as ends:
        sent = [ends.publish(version, tensors(version)) for version in (1, 2)]
    (path / "version-00000003").mkdir()
    (path / "version-00000003" / FIRST).write_bytes(b"half")
    (path / "version-00000003" / "manifest.msgpack.tmp").write_bytes(b"half")
    (path / "version-of-mine").mkdir()
    with publishing(path, "one") as ends:
        # when
        ends.sender.adopt([(each.manifest, each.where) for each in sent[1:]])
        # then
        assert names(path) == ["version-00000002", "version-of-mine"]
        sent[1].check(ends.fetch(ends.receiver(), sent[1]))
        new = ends.publish(3, tensors(3))
        ends.keep(3)
        assert names(path) == ["version-00000003", "version-of-mine"]
        new.check(ends.fetch(ends.receiver(), new))


def test_versions_of_another_run_are_removed_only_when_that_is_asked_for(path: Path, tmp_path: Path) -> None:
    # given what a run left that is over
    weights = {"w": np.ones(4, np.float32)}
    for name in ("one", "two"):
        with af.serve(tmp_path / name) as run:
            if name == "two":
                # when another one is to publish there
                for _ in range(2):
                    with pytest.raises(
                        ConfigError, match=r"holds versions of another run: version-00000002 and 1 more"
                    ):
                        run.weight_publisher("file", path=path)
                # then nothing of it has gone
                assert names(path) == ["version-00000001", "version-00000002"]
                assert set(load_numpy(path / "version-00000002" / "model-00001-of-00001.safetensors")) == {"w"}
            with run.weight_publisher(
                "file", path=path, **({"overwrite": True} if name == "two" else {})
            ) as publisher:
                # and it goes when the run may overwrite it
                assert names(path) == []
                for version in (1, 2):
                    publisher.publish(version, weights.items()).wait()
            # and what is the run's own it has back
            with run.weight_publisher("file", path=path) as publisher:
                assert names(path) == ["version-00000001", "version-00000002"]
                assert publisher.current == 2


def publish_in_a_run(directory: str, path: str) -> None:
    """Publish version 1 in a durable run, say so, and stay alive."""
    with af.serve(directory, durability="process") as run:
        run.weight_publisher("file", path=path).publish(1, {"w": np.ones(4)}).wait()
        say("there")
        hear()


def test_a_run_that_comes_back_goes_on_in_its_path(path: Path, tmp_path: Path) -> None:
    with Child(publish_in_a_run, str(tmp_path / "run"), str(path)) as child:
        assert child.hear() == "there"
        (path / "version-00000007").mkdir()  # it had not come to tell of this one
        (path / "version-00000007" / "manifest.msgpack").write_bytes(b"")
        child.kill()
    with af.serve(tmp_path / "other") as other, pytest.raises(ConfigError, match="holds versions of another run"):
        other.weight_publisher("file", path=path)
    with (
        af.serve(tmp_path / "run", durability="process") as run,
        run.weight_publisher("file", path=path) as publisher,
    ):
        assert names(path) == ["version-00000001"]
        assert publisher.current == 1


def test_what_other_ranks_or_people_have_in_a_path_is_no_other_run(path: Path) -> None:
    with publishing(path, "one") as ends:
        ends.publish(1, tensors())
    manifest = path / "version-00000001" / "manifest.msgpack"
    manifest = manifest.rename(manifest.with_name("manifest-1-of-2.msgpack"))
    (path / "version-00000003").mkdir()  # not whole: it does not count
    (path / "version-3").mkdir()
    with publishing(path, "two") as ends:
        ends.sender.adopt([])
        assert names(path) == ["version-00000001", "version-3"]
    manifest.rename(manifest.with_name("manifest-0-of-2.msgpack"))
    with publishing(path, "two"):
        pass
    with (
        pytest.raises(ConfigError, match="of another run: version-00000001. Give"),
        publishing(path, "three"),
    ):
        pass
    assert names(path) == ["version-00000001", "version-3"]


def test_one_publisher_at_a_time_writes_into_a_path(path: Path) -> None:
    with Child(publish_and_stay, str(path)) as one:
        left = int(one.hear())
        with pytest.raises(ConfigError, match="another publisher writes versions into"), publishing(path):
            pass
        assert names(path) == ["version-00000001"]
        # and when it is killed, the next one may, though a child that it forked is alive
        one.kill()
        try:
            with publishing(path, "run"):
                pass
        finally:
            os.kill(left, signal.SIGKILL)


def test_a_path_is_held_against_other_publishers_of_the_same_process(path: Path) -> None:
    # given
    with publishing(path, "one") as ends:
        ends.publish(1, tensors())
        # when
        with pytest.raises(ConfigError, match="another publisher writes versions into"):
            ends.another_sender()
        # then the refused one has let nothing go
        with Child(publish_and_stay, str(path)) as other:
            assert other.wait() != 0
            assert "another publisher writes versions into" in other.errors()
        assert names(path) == ["version-00000001"]
    make_transport("file", path=path).sender(Host(directory=None, name="1-0", run="one")).close()


def test_a_second_publisher_of_a_run_is_refused_before_it_touches_the_path(path: Path, tmp_path: Path) -> None:
    weights = {"w": np.ones(4, np.float32)}
    with af.serve(tmp_path / "run") as run, run.weight_publisher("file", path=path) as publisher:
        publisher.publish(1, weights.items()).wait()
        for elsewhere in (path, tmp_path / "elsewhere"):
            with pytest.raises(ConfigError, match="publisher already"):
                run.weight_publisher("file", path=elsewhere)
        assert not (tmp_path / "elsewhere").exists()
        with pytest.raises(ConfigError, match="another publisher writes versions into"), publishing(path):
            pass
        with next(iter(run.weight_updates(timeout_s=60))) as update:
            assert dict(update.arrays())["w"].tolist() == [1.0] * 4


def test_who_cannot_open_its_path_has_not_the_role(path: Path, tmp_path: Path) -> None:
    with af.serve(tmp_path / "run") as run:
        with pytest.raises(ConfigError, match="needs a path"):
            run.weight_publisher("file")
        with run.weight_publisher("file", path=path) as publisher:
            publisher.publish(1, {"w": np.ones(4)}.items()).wait()


def test_a_disk_that_fills_up_fails_one_version_and_leaves_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 8) as disk, publishing(disk.path / "weights") as ends:
        kept = [ends.publish(version, {"w": np.full(3 << 20, version, np.uint8)}) for version in (1, 2)]
        ends.keep(1, 2)
        receiver = ends.receiver()
        # when
        manifest, _ = ends.write(3, {"w": np.full(6 << 20, 3, np.uint8)}, chunk=64 << 20)
        with pytest.raises(MemoryFull) as caught:
            ends.send(manifest)
        # then
        assert str(caught.value).startswith("version 3: no room for its 6291456 bytes in ")
        assert "version-00000003: No space left on device" in str(caught.value)
        assert names(disk.path / "weights") == ["version-00000001", "version-00000002"]
        for each in kept:
            each.check(ends.fetch(receiver, each))
        # and the next comes when there is room again
        ends.keep(1)
        last = ends.publish(4, {"w": np.full(2 << 20, 4, np.uint8)})
        last.check(ends.fetch(receiver, last))


def test_nothing_is_written_through_a_link_in_the_place_of_a_version(path: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with publishing(path) as ends:
        (path / "version-00000001").symlink_to(tmp_path / "other")
        with pytest.raises(NotADirectoryError, match="version 1: it is a symbolic link; .*'.*version-00000001'"):
            ends.publish(1, tensors())
        assert names(tmp_path / "other") == []
        ends.publish(2, tensors())


def test_an_error_while_writing_leaves_nothing(
    files: TransportHarness, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int) -> None:
        raise OSError(5, "Input/output error")

    files.publish(1, tensors())
    files.keep(1)
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="version 2: Input/output error: '.*version-00000002'"):
        files.publish(2, tensors())
    monkeypatch.undo()
    assert names(path) == ["version-00000001"]
