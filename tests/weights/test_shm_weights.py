"""Weights through shared memory: bit-exact, proven by digests, and no receiver holds up the sender."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
import torch
from children import Child
from hypothesis import example, given, settings
from hypothesis import strategies as st
from weight_children import hold
from written import same, send, write

from asyncflow_sdk.errors import ConfigError, DigestMismatch, MemoryFull, VersionGone
from asyncflow_sdk.interfaces import Host
from asyncflow_sdk.memory import SharedDirectory
from asyncflow_sdk.types import Manifest
from asyncflow_sdk.weights import Update
from asyncflow_sdk.weights.shm import ShmReceiver, ShmSender, ShmTransport

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
BUCKET = 1 << 16
PAGE_SLACK = 1 << 17


@pytest.fixture
def directory() -> Iterator[Path]:
    shared = SharedDirectory(Path("/dev/shm"))
    yield shared.path
    shared.close()


@pytest.fixture
def sender(directory: Path) -> Iterator[ShmSender]:
    sender = ShmSender(directory, "1-0")
    yield sender
    sender.close()


@pytest.fixture
def receiver(directory: Path) -> Iterator[ShmReceiver]:
    receiver = ShmReceiver(directory)
    yield receiver
    receiver.close()


def test_every_dtype_and_shape_arrives_bit_for_bit(sender: ShmSender, receiver: ShmReceiver) -> None:
    # given tensors of every dtype of torch, some larger than a bucket, many smaller, some empty or 0-dimensional
    numbers = np.random.default_rng(0)
    raw = torch.from_numpy(numbers.integers(0, 256, (8, 48), np.uint8))
    names = {str(d).removeprefix("torch.") for d in vars(torch).values() if type(d) is torch.dtype}
    weights: dict[str, Any] = {
        f"all.{name}": (raw % 2 if name == "bool" else raw).view(getattr(torch, name))
        for name in sorted(names)
        if not name.startswith("q")
    }
    live = torch.nn.Linear(300, 200)
    weights |= {
        "large": torch.from_numpy(numbers.random((3, BUCKET // 8 + 7))),
        "parameter": live.weight,
        "transposed": live.weight.t(),
        "strided": torch.arange(100.0)[::3],
        "conjugate": torch.complex(torch.randn(5), torch.randn(5)).conj(),
        "bfloat16": torch.randn(129, 65).to(torch.bfloat16),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")], dtype=torch.bfloat16),
        "empty": torch.empty(0, 4),
        "empty.bfloat16": torch.empty(3, 0, dtype=torch.bfloat16),
        "scale": torch.tensor(0.125, dtype=torch.float64),
        "numpy": np.arange(7, dtype=ml_dtypes.float8_e5m2),
        "numpy.big": np.arange(7, dtype=">f4"),
        "numpy.fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        "numpy.reversed": np.arange(12.0)[::-1],
        "numpy.scalar": np.float32(3),
        **{f"small.{i}": torch.full((i % 5,), float(i)) for i in range(500)},
    }
    # when
    sent = send(sender, 1, weights.items(), bucket=BUCKET)
    # then
    same(weights, sent.update(receiver))
    assert sent.manifest.digested
    assert len(list(sent.manifest.buckets())) > 5
    assert all(tensor.offset % 64 == 0 for tensor in sent.manifest.tensors)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=20), bucket=st.sampled_from([64, 128, 192, 1000, 4096])
)
@example(sizes=[1, 0, 0, 0, 0, 1], bucket=128)
def test_buckets_of_any_size_cover_every_byte(sizes: list[int], bucket: int) -> None:
    # given
    shared = SharedDirectory(Path("/dev/shm"))
    sender, receiver = ShmSender(shared.path, "1-0"), ShmReceiver(shared.path)
    weights = {f"t{i}": np.random.default_rng(i).integers(0, 256, size, np.uint8) for i, size in enumerate(sizes)}
    try:
        # when
        sent = send(sender, 1, weights.items(), bucket=bucket)
        # then
        same(weights, sent.update(receiver))
        assert sent.manifest.root == send(sender, 2, weights.items(), bucket=bucket).manifest.root
        # and whatever single byte of a tensor is flipped, it is found, with bucket and tensor named
        for name in [t.name for t in sent.manifest.tensors if t.nbytes][:4]:
            flip(shared.path, sent.manifest, sent.where, name, at=-1)
            with pytest.raises(DigestMismatch, match=rf"version 1: bucket \d+ .*holds .*{name}"):
                sent.fetched(receiver)
            flip(shared.path, sent.manifest, sent.where, name, at=-1)
        sent.fetched(receiver)
    finally:
        receiver.close()
        sender.close()
        shared.close()


def flip(directory: Path, manifest: Manifest, where: bytes, name: str, at: int) -> None:
    """Change a byte of a tensor where it lies in shared memory."""
    tensor = next(t for t in manifest.tensors if t.name == name)
    segment, start, *_ = msgspec.msgpack.decode(where)[tensor.chunk]
    place = start + 64 + tensor.offset + at % tensor.nbytes
    with (directory / segment).open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 0x10]))


def test_an_engine_may_work_in_place(sender: ShmSender, receiver: ShmReceiver) -> None:
    # given two replicas of one version
    sent = send(sender, 1, [("w", torch.arange(1000.0))])
    one, two = (sent.update(receiver) for _ in range(2))
    # when
    dict(one)["w"].mul_(3)
    # then
    assert float(dict(one)["w"][10]) == 30
    assert float(dict(two)["w"][10]) == 10
    assert float(dict(sent.update(receiver))["w"][10]) == 10
    one.release()
    one.release()
    with pytest.raises(VersionGone, match="version 1 was released"):
        list(one)
    # nor does what it wrote come back with the mapping
    sender.keep([])
    same({"w": torch.zeros(1000)}, send(sender, 2, [("w", torch.zeros(1000))]).update(receiver))
    same({"w": torch.ones(1000)}, send(sender, 3, [("w", torch.ones(1000))]).update(receiver))


def test_a_receiver_maps_each_block_once(sender: ShmSender, receiver: ShmReceiver) -> None:
    # given
    addresses = set()
    for version in range(12):
        weights = {"w": torch.full((1 << 18,), float(version))}
        update = send(sender, version, weights.items()).update(receiver)
        # when its version is kept no longer, and nobody has written into it
        sender.keep([version])
        same(weights, update)
        tensor = dict(update)["w"]
        addresses.add(tensor.data_ptr())
        del tensor, update
    # then its mapping is that of a version to come
    assert len(addresses) <= 3


def test_a_tensor_that_outlives_its_update_never_changes(sender: ShmSender, receiver: ShmReceiver) -> None:
    # given a tensor that an engine kept, which it should not
    kept = dict(send(sender, 0, [("w", torch.zeros(1 << 16))]).update(receiver))["w"]
    for version in range(1, 8):
        weights = {"w": torch.full((1 << 16,), float(version))}
        # when versions come and go, and it is written into late
        update = send(sender, version, weights.items()).update(receiver)
        sender.keep([version])
        assert float(kept.abs().sum()) == 0.0
        same(weights, update)
    kept.fill_(9)
    # then they have nothing to do with each other
    same(weights, update)


def test_a_reader_that_holds_an_old_version_for_ever_holds_up_nobody(
    directory: Path, sender: ShmSender, receiver: ShmReceiver
) -> None:
    # given a replica in another process, frozen with version 0 in hand
    model = 1 << 20
    sent = send(sender, 0, [("w", np.zeros(model, np.float32))])
    encoded = msgspec.json.encode(sent.manifest).decode()
    with Child(hold, str(directory), encoded, sent.where.hex()) as reader:
        assert reader.hear() == 0.0
        reader.stop()
        # when twenty more are published
        for version in range(1, 21):
            weights = {"w": np.full(model, version, np.float32)}
            sent = send(sender, version, weights.items())
            sender.keep([version - 1, version])
            same(weights, sent.update(receiver))
        # then memory is that of three versions and of the one that is held
        assert sender.nbytes <= 4 * (4 * model + PAGE_SLACK)
        assert held(directory) == sender.nbytes
        # and the reader sees what it saw
        reader.resume()
        reader.say("look")
        assert reader.hear() == [0.0, 0.0]
    # and once it is gone, what it held is given back
    for version in range(21, 24):
        send(sender, version, [("w", np.full(model, version, np.float32))])
        sender.keep([version - 1, version])
    assert held(directory) == sender.nbytes <= 3 * (4 * model + PAGE_SLACK)


def held(directory: Path) -> int:
    """Bytes that the files really take."""
    return sum(path.stat().st_blocks * 512 for path in directory.glob("w*"))


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_memory_is_that_of_what_is_kept_and_one_more(directory: Path, sender: ShmSender, keep: int) -> None:
    model = {f"w{i}": np.zeros(n, np.float32) for i, n in enumerate((1 << 20, 3, 5 << 17, 1 << 18))}
    nbytes, sizes = sum(array.nbytes for array in model.values()), []
    for version in range(12):
        sent = send(sender, version, model.items(), sizes=sizes)
        sizes = [chunk.nbytes for chunk in sent.manifest.chunks]
        sender.keep(range(version - keep + 1, version + 1))
        assert held(directory) == sender.nbytes <= (keep + 1) * nbytes + (4 << 20) + PAGE_SLACK
    assert sender.nbytes <= (keep + 1) * nbytes + (1 << 20)


def test_models_that_change_their_size_leave_nothing_behind(sender: ShmSender) -> None:
    for version in range(20):
        send(sender, version, [("w", np.zeros((1 << 20) + version * 10_000, np.float32))])
        sender.keep([version - 1, version])
    assert sender.nbytes <= 4 * (5 << 20)


def test_a_late_reader_learns_that_its_version_is_gone(sender: ShmSender, receiver: ShmReceiver) -> None:
    # given
    sent = []
    for version in range(6):
        sent.append(send(sender, version, [("w", np.full(1 << 19, version, np.float32))]))
        sender.keep([version - 1, version])
    # when / then: the newest two are there, older ones are gone and nothing else is taken for them
    for version, each in enumerate(sent):
        if version >= 4:
            same({"w": np.full(1 << 19, version, np.float32)}, each.update(receiver))
        else:
            with pytest.raises(VersionGone, match=f"version {version} is no longer kept"):
                each.fetched(receiver)


def test_a_version_that_was_abandoned_pushes_out_none(sender: ShmSender, receiver: ShmReceiver) -> None:
    kept = send(sender, 1, [("w", np.full(1 << 19, 1, np.float32))])
    sender.keep([1])
    for _ in range(5):
        given_up = send(sender, 2, [("w", np.full(1 << 19, 9, np.float32))])
        sender.abandon()
        with pytest.raises(VersionGone):
            given_up.fetched(receiver)
        write(sender, 2, [("w", np.full(1 << 19, 9, np.float32))])
        sender.abandon()
    sender.abandon()  # nothing is being written: nothing happens
    same({"w": np.full(1 << 19, 1, np.float32)}, kept.update(receiver))


def test_a_version_that_fails_half_way_keeps_what_there_was(
    sender: ShmSender, receiver: ShmReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given
    sent = send(sender, 1, [("w", np.ones(1 << 19, np.float32))])
    sender.keep([1])
    # when there is no room, again and again
    monkeypatch.setattr("asyncflow_sdk.memory.segment.os.posix_fallocate", no_room)
    for version in range(2, 6):
        with pytest.raises(MemoryFull, match=rf"version {version}: tensor '[wx]': no room for"):
            send(sender, version, [("w", np.ones(1 << 19, np.float32)), ("x", np.ones(1 << 21, np.float32))])
        sender.abandon()
    # then
    same({"w": np.ones(1 << 19, np.float32)}, sent.update(receiver))


def no_room(*arguments: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_successor_keeps_what_is_kept_and_removes_the_rest(directory: Path, receiver: ShmReceiver) -> None:
    # given senders of two ranks, one of which is replaced
    model = {"w": np.full(1 << 18, 1, np.float32)}
    dead, other = ShmSender(directory, "1-0"), ShmSender(directory, "2-0", rank=1)
    versions = [send(dead, version, model.items()) for version in range(4)]
    theirs = send(other, 3, model.items())
    reading = versions[0].update(receiver)
    # when
    new = ShmSender(directory, "3-0")
    new.adopt([(each.manifest, each.where) for each in versions[2:]])
    mine = send(new, 4, model.items())
    # then
    for sent in (*versions[2:], theirs, mine):
        same(model, sent.update(receiver))
    for sent in versions[:2]:
        with pytest.raises(VersionGone):
            sent.fetched(ShmReceiver(directory))
    same(model, reading)
    assert new.nbytes == held(directory) - other.nbytes
    # and what is kept no longer goes
    new.keep([4])
    for sent in versions:
        with pytest.raises(VersionGone):
            sent.fetched(ShmReceiver(directory))
    assert new.nbytes == held(directory) - other.nbytes
    same(model, theirs.update(receiver))


def test_memory_for_the_next_version_is_there_before_it_comes(sender: ShmSender) -> None:
    # given
    weights = {f"w{i}": np.zeros(n, np.float32) for i, n in enumerate((1 << 20, 3, 5 << 17))}
    manifest = send(sender, 1, weights.items()).manifest
    sender.keep([1])
    sizes = [chunk.nbytes for chunk in manifest.chunks]
    # when it is left at some step, and begun again
    next(sender.prepare(sizes))
    assert len(list(sender.prepare(sizes))) == len(sizes) - 1
    held_before = sender.nbytes
    # then the next version takes nothing more
    send(sender, 2, weights.items(), sizes=sizes)
    assert sender.nbytes == held_before
    assert list(sender.prepare([])) == []


def test_without_the_runs_memory_another_transport_is_named() -> None:
    far = Host(directory=None, name="1-0")
    for end in (ShmTransport().sender, ShmTransport().receiver):
        with pytest.raises(ConfigError, match=r"not in sight.*'tcp' or 'file'"):
            end(far)


def test_what_was_released_is_not_read(sender: ShmSender, receiver: ShmReceiver) -> None:
    fetched = send(sender, 1, [("w", np.zeros(4))]).fetched(receiver)
    update = Update(1, [fetched])
    update.release()
    assert fetched.chunks == ()
