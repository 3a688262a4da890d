"""Version directories: any tool reads them, damage is found and named, and nothing half-written counts or stays."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
import torch
from children import Child
from file_children import attempt, fill, publish_and_fork, publish_and_stay, publish_in_a_run
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file as load_numpy
from safetensors.torch import load_file

import asyncflow_sdk as af
from asyncflow_sdk.errors import (
    ConfigError,
    DeadlineExceeded,
    DigestMismatch,
    ProtocolError,
    VersionGone,
    WeightError,
    WeightMismatch,
)
from asyncflow_sdk.interfaces import Host
from asyncflow_sdk.testing.ends import Ends, Sent
from asyncflow_sdk.types import Manifest, TensorInfo
from asyncflow_sdk.weights import file
from asyncflow_sdk.weights.file import FileTransport
from asyncflow_sdk.weights.safetensor_files import chunk_files

RANDOM = np.random.default_rng(0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "weights"


@pytest.fixture
def ends(path: Path) -> Iterator[Ends]:
    with Ends(lambda: FileTransport(path), FileTransport) as made:
        yield made


def tensors(seed: int = 0, count: int = 6) -> dict[str, Any]:
    """Of sizes that need padding in memory."""
    numbers = np.random.default_rng(seed)
    return {f"layer.{n}": numbers.integers(0, 256, 30_000 + 7 * n, np.uint8) for n in range(count)}


def names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir() if not each.name.startswith("."))


def test_a_model_is_loaded_from_a_version_directory_by_its_library(path: Path) -> None:
    # given a model with tied weights
    from transformers import AutoModelForCausalLM, LlamaConfig

    from asyncflow_sdk.weights.writing import Writer

    config = LlamaConfig(
        vocab_size=97, hidden_size=36, intermediate_size=50, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=18, tie_word_embeddings=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    transport = FileTransport(path)
    with Ends(lambda: transport, FileTransport) as ends:
        # when it is published
        writer = Writer(12, ends.sender.room, lambda chunk, memory: None)
        sizes = writer.write(model.state_dict(keep_vars=True).items())
        from asyncflow_sdk.types import Chunk

        ends.send(Manifest(12, writer.tensors, tuple(Chunk(size) for size in sizes)))
    # then
    place = path / "version-00000012"
    config.save_pretrained(place)
    loaded = AutoModelForCausalLM.from_pretrained(place)
    assert loaded.dtype == torch.bfloat16
    for name, wanted in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], wanted), name
    index = json.loads((place / "model.safetensors.index.json").read_text())
    assert index["metadata"]["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}
    assert set(index["weight_map"]) == set(model.state_dict()) - {"lm_head.weight"}
    assert index["metadata"]["version"] == 12


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=25),
    chunk=st.sampled_from([64, 512, 1 << 16]),
)
def test_any_tensors_are_valid_files(
    shapes: list[list[int]], chunk: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    dtypes = [np.float32, ml_dtypes.bfloat16, np.int8, np.complex128, np.bool_, ml_dtypes.float8_e4m3fn]
    weights = {f'ä.{n} " {{': np.ones(shape, dtypes[n % 6]) * (n % 2) for n, shape in enumerate(shapes)}
    path = tmp_path_factory.mktemp("any")
    with Ends(lambda: FileTransport(path), FileTransport) as ends:
        sent = ends.publish(1, weights, chunk=chunk)
        sent.check(ends.fetch(ends.receiver(), sent))
    found: dict[str, Any] = {}
    for each in sorted((path / "version-00000001").glob("*.safetensors")):
        found |= load_file(each)
    assert found.keys() == weights.keys()
    for name, array in weights.items():
        assert found[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() == array.tobytes(), name


def test_pieces_of_a_tensor_are_told_apart_by_where_they_begin(path: Path) -> None:
    with Ends(lambda: FileTransport(path), FileTransport) as ends:
        manifest, memories = ends.write(1, {"a": np.ones((2, 16), np.float32), "b": np.zeros((2, 16), np.float32)})
        pieces = tuple(
            TensorInfo("w", "float32", (2, 16), 0, each.offset, (2 * n, 0), (8, 16))
            for n, each in enumerate(manifest.tensors)
        )
        manifest = msgspec.structs.replace(manifest, tensors=pieces)
        sent = Sent(manifest, [memories[0].copy()], ends.send(manifest))
        sent.check(ends.fetch(ends.receiver(), sent))
    found = load_numpy(path / "version-00000001" / "model-00001-of-00001.safetensors")
    assert {name: float(array.sum()) for name, array in found.items()} == {"w@0,0": 32.0, "w@2,0": 0.0}


def test_ranks_have_directories_of_their_own(path: Path, tmp_path: Path) -> None:
    senders = [
        FileTransport(path).sender(Host(directory=tmp_path, name=f"{rank}-0", rank=rank, world_size=2))
        for rank in (0, 1)
    ]
    manifest = Manifest(3, (), ())
    for sender in senders:
        sender.adopt([])
        sender.send(manifest)
    assert names(path) == ["version-00000003-rank-0-of-2", "version-00000003-rank-1-of-2"]
    senders[1].keep([])
    assert names(path) == ["version-00000003-rank-0-of-2"]
    for sender in senders:
        sender.close()


# ---- damage


FIRST = "model-00001-of-00003.safetensors"
SECOND = "model-00002-of-00003.safetensors"


def change(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 0x10
    file.write_bytes(data)


def swap_files(place: Path) -> None:
    (place / FIRST).rename(place / "x")
    (place / SECOND).rename(place / FIRST)
    (place / "x").rename(place / SECOND)


def link_elsewhere(place: Path) -> None:
    (place / FIRST).rename(place.parent / "elsewhere")
    (place / FIRST).symlink_to(place.parent / "elsewhere")


def turn_into_a_pipe(place: Path) -> None:
    (place / SECOND).unlink()
    os.mkfifo(place / SECOND)


def turn_into_a_directory(place: Path) -> None:
    (place / FIRST).unlink()
    (place / FIRST).mkdir()


def take_from_another_version(place: Path) -> None:
    os.replace(place.parent / "version-00000001" / FIRST, place / FIRST)


DAMAGE: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "a flipped bit": (
        lambda p: change(p / SECOND, -100), DigestMismatch, rf"version 2: bucket 0 of chunk 1 .*layer\.\d.*{SECOND}",
    ),
    "a flipped bit in a header": (lambda p: change(p / FIRST, 30), DigestMismatch, f"header of .*{FIRST}.*layer.0"),
    "a flipped bit in the length of a header": (lambda p: change(p / FIRST, 6), DigestMismatch, f"header of .*{FIRST}"),
    "a flipped bit in the manifest": (
        lambda p: change(p / "manifest.msgpack", 20), DigestMismatch, r"manifest.msgpack is not the manifest",
    ),
    "a truncated file": (
        lambda p: os.truncate(p / SECOND, 1000), DigestMismatch, rf"version 2: .*{SECOND} has 1000 bytes.*layer\.\d",
    ),
    "an empty file": (lambda p: os.truncate(p / SECOND, 0), DigestMismatch, f"{SECOND} has 0 bytes"),
    "a longer file": (lambda p: (p / SECOND).open("ab").write(b"x"), DigestMismatch, f"{SECOND} has"),
    "a truncated manifest": (lambda p: os.truncate(p / "manifest.msgpack", 9), DigestMismatch, "manifest.msgpack has 9"),
    "a huge manifest": (
        lambda p: os.truncate(p / "manifest.msgpack", 1 << 40), DigestMismatch, "manifest.msgpack has 1099511627776",
    ),
    "a missing file": (lambda p: (p / FIRST).unlink(), DigestMismatch, rf"version 2: .*{FIRST} is missing.*layer\.0"),
    "a missing manifest": (lambda p: (p / "manifest.msgpack").unlink(), VersionGone, "version 2 is no longer kept"),
    "a missing directory": (lambda p: p.rename(p.parent / "x"), VersionGone, "version 2 is no longer kept"),
    "files in the place of others": (swap_files, DigestMismatch, "version 2: "),
    "a file of another version": (take_from_another_version, DigestMismatch, "version 2: bucket 0 of chunk 0"),
    "a symbolic link": (link_elsewhere, DigestMismatch, rf"version 2: .*{FIRST} is no regular file"),
    "a pipe": (turn_into_a_pipe, DigestMismatch, f"{SECOND} is no regular file"),
    "a directory": (turn_into_a_directory, DigestMismatch, f"{FIRST} is no regular file"),
    "a link in the place of the directory": (
        lambda p: p.rename(p.parent / "x").parent.joinpath(p.name).symlink_to(p.parent / "x"), DigestMismatch, "symbolic link",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_found_and_the_next_version_comes(what: str, ends: Ends, path: Path) -> None:
    # given
    damage, error, reason = DAMAGE[what]
    for version in (1, 2):
        sent = ends.publish(version, tensors(version), chunk=1 << 16)
    ends.keep(1, 2)
    receiver = ends.receiver()
    # when
    damage(path / "version-00000002")
    # then
    for _ in range(2):
        with pytest.raises(error, match=reason):
            ends.fetch(receiver, sent)
    ends.keep(1)
    sent = ends.publish(3, tensors(3))
    sent.check(ends.fetch(receiver, sent))


def test_files_of_others_in_a_directory_do_no_harm_and_stay(ends: Ends, path: Path) -> None:
    sent = ends.publish(1, tensors())
    (path / "version-00000001" / "config.json").write_text("{}")
    (path / "notes").write_text("mine")
    sent.check(ends.fetch(ends.receiver(), sent))
    ends.keep()
    assert names(path) == ["notes", "removed-version-00000001"]
    assert names(path / "removed-version-00000001") == ["config.json"]


def test_a_version_that_goes_while_it_is_read_is_gone(
    ends: Ends, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a read that has come to the second file
    sent = ends.publish(1, tensors(), chunk=1 << 16)
    receiver, pread = ends.receiver(), os.preadv
    reads: list[int] = []

    def preadv(*arguments: Any) -> int:
        reads.append(1)
        if len(reads) == 3:
            ends.keep()
        return pread(*arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    # when / then
    with pytest.raises(VersionGone, match="version 1 is no longer kept"):
        ends.fetch(receiver, sent)


def test_reads_and_writes_may_be_short(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: read(fd, [views[0][:1000]], at))
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: write(fd, [views[0][:777]], at))
    sent = ends.publish(1, tensors())
    sent.check(ends.fetch(ends.receiver(), sent))


def test_a_file_that_shrinks_while_it_is_read_is_named(
    ends: Ends, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = ends.publish(1, tensors(), chunk=1 << 16)
    read = os.preadv

    def preadv(fd: int, views: Any, at: int) -> int:
        os.truncate(path / "version-00000001" / FIRST, 5000)
        return read(fd, views, at)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(DigestMismatch, match=rf"version 1: .*{FIRST} ends at byte 5000; it holds layer\.0"):
        ends.fetch(ends.receiver(), sent)


def test_a_read_ends_by_its_deadline_and_by_an_interrupt(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = ends.publish(1, tensors())
    receiver = ends.receiver()
    with pytest.raises(DeadlineExceeded, match="version 1: .*version-00000001 was not read within 0 s"):
        ends.fetch(receiver, sent, timeout_s=0.0)
    read = os.preadv

    def preadv(*arguments: Any) -> int:
        receiver.interrupt()
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(VersionGone, match="version 1 is wanted no more"):
        ends.fetch(receiver, sent)
    monkeypatch.undo()
    sent.check(ends.fetch(receiver, sent))


# ---- places


def test_a_path_is_needed_and_must_be_writable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for transport, reason in (
        (FileTransport(), 'needs a path .*for example.*path="/mnt/shared'),
        (FileTransport(""), "needs a path"),
        (FileTransport(tmp_path / "file"), "cannot write into .*file: File exists"),
        (FileTransport(tmp_path / "file" / "inside"), 'cannot write into .*Not a directory.*for example path="/mnt'),
        (FileTransport("/proc/self"), "cannot write into /proc/self"),
    ):
        with pytest.raises(ConfigError, match=reason):
            transport.sender(Host(directory=tmp_path, name="1-0"))


def test_where_names_only_the_version_it_is_of(ends: Ends, path: Path, tmp_path: Path) -> None:
    # given versions that exist, and one outside of the path
    one, two = (ends.publish(version, tensors(version)) for version in (1, 2))
    (tmp_path / "version-00000002").symlink_to(path / "version-00000002")
    receiver = ends.receiver()
    for place in (
        (str(path), "version-00000001"),
        (str(path), "../weights/version-00000002"),
        (str(path), "version-00000002/"),
        (str(path), "version-00000002/../version-00000002"),
        (str(path), "version-2"),
        (str(path), "version-00000002-rank-1"),
        (str(path), "version-٠٠٠٠٠٠٠٢"),
        (str(path), ""),
        ("weights", "version-00000002"),
        ("", "version-00000002"),
    ):
        with pytest.raises(ProtocolError, match="version 2: what its publisher says of its place cannot be read"):
            ends.fetch(receiver, two, where=msgspec.msgpack.encode(place))
    with pytest.raises(DigestMismatch, match="symbolic link"):
        ends.fetch(receiver, two, where=msgspec.msgpack.encode((str(tmp_path), "version-00000002")))
    one.check(ends.fetch(receiver, one))


def test_a_directory_that_is_mounted_elsewhere_is_found_by_the_environment(
    ends: Ends, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = ends.publish(1, tensors())
    path.rename(tmp_path / "elsewhere")
    with pytest.raises(WeightError, match="version 1: .*weights.* is not on this host.*ASYNCFLOW_WEIGHTS_PATH"):
        ends.fetch(ends.receiver(), sent)
    monkeypatch.setenv(file.PATH, str(tmp_path / "elsewhere"))
    sent.check(ends.fetch(ends.receiver(), sent))
    (tmp_path / "elsewhere").rename(path)


def test_a_place_that_no_host_can_have_is_an_error_of_the_sdk(ends: Ends, path: Path) -> None:
    sent = ends.publish(1, tensors())
    receiver = ends.receiver()
    good = msgspec.msgpack.encode((str(path), "version-00000001"))
    for where, error in (
        (msgspec.msgpack.encode(("/" + "x" * 5000, "version-00000001")), WeightError),
        (msgspec.msgpack.encode(("/x" * 5000, "version-00000001")), WeightError),
        (b"\x93" + good[1:] + b"\x91" * 100_000 + b"\xc0", ProtocolError),
        (b"\x91" * 100_000 + b"\xc0", ProtocolError),
    ):
        with pytest.raises(error, match="^version 1: "):
            ends.fetch(receiver, sent, where=where)
    sent.check(ends.fetch(receiver, sent))


def test_a_path_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    with Ends(lambda: FileTransport("~/weights"), FileTransport) as ends:
        sent = ends.publish(1, tensors())
        assert names(tmp_path / "home" / "weights") == ["version-00000001"]
        monkeypatch.setenv(file.PATH, "~/weights")
        sent.check(ends.fetch(ends.receiver(), sent))
    with pytest.raises(ConfigError, match="cannot write into ~nobody-of-this-name/weights: .*home"):
        FileTransport("~nobody-of-this-name/weights").sender(Host(directory=None, name="1-0"))
    assert names(tmp_path) == ["home"]


# ---- publishers


def test_what_a_killed_publisher_left_half_written_goes(path: Path) -> None:
    # given versions of a publisher that is gone: a whole one that is kept, one that is not, and halves of others
    with Ends(lambda: FileTransport(path), FileTransport, run="one") as ends:
        sent = [ends.publish(version, tensors(version)) for version in (1, 2)]
    (path / "version-00000003").mkdir()
    (path / "version-00000003" / FIRST).write_bytes(b"half")
    (path / "version-00000003" / "manifest.msgpack.tmp").write_bytes(b"half")
    (path / "removed-version-00000000").mkdir()
    (path / "removed-version-00000000" / FIRST).write_bytes(b"half")
    (path / "version-of-mine").mkdir()
    with Ends(lambda: FileTransport(path), FileTransport, run="one") as ends:
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


def test_a_run_that_comes_back_goes_on_in_its_path(path: Path, tmp_path: Path) -> None:
    with Child(publish_in_a_run, str(tmp_path / "run"), str(path)) as child:
        assert child.hear() == "there"
        (path / "version-00000007").mkdir()  # it had not come to tell of this one
        (path / "version-00000007" / "manifest.msgpack").write_bytes(b"")
        child.kill()
    with Child(publish_in_a_run, str(tmp_path / "other"), str(path)) as other:
        assert "holds versions of another run" in other.hear()
    with (
        af.serve(tmp_path / "run", durability="process") as run,
        run.weight_publisher("file", path=path) as publisher,
    ):
        assert names(path) == ["version-00000001"]
        assert publisher.current == 1


def test_what_other_ranks_or_people_have_in_a_path_is_no_other_run(path: Path) -> None:
    with Ends(lambda: FileTransport(path), FileTransport, run="one") as ends:
        ends.publish(1, tensors())
    (path / "version-00000001").rename(path / "version-00000001-rank-1-of-2")
    (path / "version-00000003").mkdir()  # not whole: it does not count
    (path / "version-3").mkdir()
    with Ends(lambda: FileTransport(path), FileTransport, run="two") as ends:
        ends.sender.adopt([])
        assert names(path) == ["version-00000001-rank-1-of-2", "version-3"]
    (path / "version-00000001-rank-1-of-2").rename(path / "version-00000001-rank-0-of-2")
    with Ends(lambda: FileTransport(path), FileTransport, run="two"):
        pass
    with (
        pytest.raises(ConfigError, match="of another run: version-00000001-rank-0-of-2. Give"),
        Ends(lambda: FileTransport(path), FileTransport, run="three"),
    ):
        pass
    assert names(path) == ["version-00000001-rank-0-of-2", "version-3"]


def test_one_publisher_at_a_time_writes_into_a_path(path: Path) -> None:
    with Child(publish_and_stay, str(path)) as one:
        assert one.hear() == "there"
        with Child(attempt, str(path)) as two:
            assert "another publisher writes versions into" in two.hear()
        assert names(path) == ["version-00000001"]
        # and when it is killed, the next one may
        one.kill()
        with Child(attempt, str(path), "run") as three:
            assert three.hear() == ""


def test_a_path_is_held_against_other_publishers_of_the_same_process(path: Path) -> None:
    # given
    with Ends(lambda: FileTransport(path), FileTransport, run="one") as ends:
        ends.publish(1, tensors())
        # when
        with pytest.raises(ConfigError, match="another publisher writes versions into"):
            ends.another_sender()
        # then the refused one has let nothing go
        with Child(attempt, str(path)) as other:
            assert "another publisher writes versions into" in other.hear()
        assert names(path) == ["version-00000001"]
    FileTransport(path).sender(Host(directory=None, name="1-0", run="one")).close()


def test_a_second_publisher_of_a_run_is_refused_before_it_touches_the_path(path: Path, tmp_path: Path) -> None:
    weights = {"w": np.ones(4, np.float32)}
    with af.serve(tmp_path / "run") as run, run.weight_publisher("file", path=path) as publisher:
        publisher.publish(1, weights.items()).wait()
        for elsewhere in (path, tmp_path / "elsewhere"):
            with pytest.raises(ConfigError, match="publisher already"):
                run.weight_publisher("file", path=elsewhere)
        assert not (tmp_path / "elsewhere").exists()
        with Child(attempt, str(path)) as other:
            assert "another publisher writes versions into" in other.hear()
        with next(iter(run.weight_updates(timeout_s=60))) as update:
            assert dict(update.arrays())["w"].tolist() == [1.0] * 4


def test_who_cannot_open_its_path_has_not_the_role(path: Path, tmp_path: Path) -> None:
    with af.serve(tmp_path / "run") as run:
        with pytest.raises(ConfigError, match="needs a path"):
            run.weight_publisher("file")
        with run.weight_publisher("file", path=path) as publisher:
            publisher.publish(1, {"w": np.ones(4)}.items()).wait()


def test_a_child_after_a_fork_does_not_hold_the_path(path: Path) -> None:
    with Child(publish_and_fork, str(path)) as one:
        left = int(one.hear())
        one.kill()
        try:
            with Child(attempt, str(path), "run") as other:
                assert other.hear() == ""
        finally:
            os.kill(left, signal.SIGKILL)


@pytest.mark.parametrize("how", ["tmpfs", "limit"])
def test_a_disk_that_fills_up_fails_one_version_and_leaves_nothing(how: str, tmp_path: Path) -> None:
    with Child(fill, str(tmp_path), how) as child:
        outcome = child.hear()
    if isinstance(outcome, str) and outcome.startswith("cannot"):
        pytest.skip(f"mounting a small file system needs root: {outcome}")
    reason = {"tmpfs": "No space left on device", "limit": "File too large"}[how]
    assert outcome["error"].startswith("version 3: no room for its 6291456 bytes in ")
    assert f"version-00000003: {reason}" in outcome["error"]
    kept = ["version-00000001", "version-00000002"] if how == "tmpfs" else ["version-00000001"]
    assert outcome["left"] == [".publisher-0", *kept]
    assert outcome["after"] == 4


def test_an_error_while_writing_leaves_nothing(ends: Ends, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(5, "Input/output error")

    ends.publish(1, tensors())
    ends.keep(1)
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="version 2: Input/output error: '.*version-00000002'"):
        ends.publish(2, tensors())
    monkeypatch.undo()
    assert names(path) == ["version-00000001"]
    manifest, memories = ends.write(3, tensors())
    memories[0][30_001] = 1  # between tensors
    with pytest.raises(WeightError, match="version 3: bytes between tensors of model-00001.* are not zero"):
        ends.send(manifest)
    assert names(path) == ["version-00000001"]


def test_tensors_that_do_not_fit_into_files_are_refused_by_name() -> None:
    from asyncflow_sdk.types import Chunk

    good = TensorInfo("a", "float32", (4,), 0, 0)
    for other, reason in (
        (TensorInfo("b", "float32", (4,), 1, 0), "tensor 'b' does not lie in chunk 1"),
        (TensorInfo("b", "float32", (40,), 0, 64), "tensor 'b' does not lie in chunk 0"),
        (TensorInfo("b", "float32", (-4,), 0, 0), "tensor 'b' does not lie"),
        (TensorInfo("b", "float32", (4,), 0, -16), "tensor 'b' does not lie"),
        (TensorInfo("b", "float32", (4,), 0, 8), "tensors 'b' and 'a' overlap"),
        (TensorInfo("a", "float32", (4,), 0, 64), "tensor 'a' is there twice"),
        (
            TensorInfo("__metadata__", "float32", (4,), 0, 64),
            "tensor '__metadata__' cannot go into a file: .*rename=",
        ),
    ):
        with pytest.raises(WeightMismatch, match=reason):
            chunk_files(Manifest(1, (good, other), (Chunk(128),)))
