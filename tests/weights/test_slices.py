"""Receivers whose ranks lie on several hosts: each fetches and verifies its slices of a version, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from children import Child
from hosts_in_namespaces import network
from hypothesis import given, settings
from hypothesis import strategies as st
from slice_ranks import LIMIT_S, Rank, model, receive, train
from test_update import parts, same
from transport_ends import FakeRelay, RelayHosts, tcp
from waiting import in_thread

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, DigestMismatch, WeightMismatch
from asyncflow_sdk.interfaces import Fetched
from asyncflow_sdk.testing.transport_harness import BUCKET, Sent
from asyncflow_sdk.types import Shard
from asyncflow_sdk.types.manifest import Chunk, digest
from asyncflow_sdk.weights import Update
from asyncflow_sdk.weights.slices import cut_slice, slice_tensors


def fetch(hosts: RelayHosts, sent: Sent, name: str, rank: Rank, base: Fetched | None = None) -> Any:
    """Begin to fetch a rank's slices; the returned call waits for it."""
    tensors = slice_tensors(sent.manifest, rank)
    return in_thread(
        hosts.receiver(name).fetch_slice, sent.manifest, tensors, sent.where, base=base, timeout_s=LIMIT_S
    )


def test_each_host_fetches_the_slices_of_its_rank_and_passes_them_on_to_hosts_with_the_same() -> None:
    with RelayHosts(fanout=1) as hosts:
        # given two receivers, each with two ranks on two hosts, and a replica that wants all
        ranks = {"a": Rank(0), "b": Rank(1), "c": Rank(0), "d": Rank(1)}
        bases: dict[str, Fetched] = {}
        for version in (1, 2):
            weights = model(1)
            if version == 2:
                weights["up"][1, ::1000] += 1
            sent = hosts.publish(version, weights)
            assert hosts.proxy is not None
            before = hosts.proxy.back
            # when
            joins = {name: fetch(hosts, sent, name, rank, bases.get(name)) for name, rank in ranks.items()}
            bases = {name: join() for name, join in joins.items()}
            # then each has the rows of its rank, bit for bit
            for name, rank in ranks.items():
                same(rank.of(weights), Update(version, [bases[name]]))
                assert bases[name].notes == []
            # and at first no more than their buckets were fetched, of a later version what differs
            most = {1: (8 + 2 + 3) * BUCKET, 2: BUCKET // 4}[version]
            assert max(each.moved for each in bases.values()) <= most
            # by each pair of hosts once from the publisher
            assert hosts.proxy.back - before < 2 * most + (64 << 10)
        whole = hosts.fetch(sent, "e")()
        assert whole.moved == sent.manifest.nbytes


def test_a_flipped_byte_in_a_slice_is_found_without_the_rest_of_the_version() -> None:
    with tcp() as ends:
        sent = ends.publish(1, model(1))
        # given a byte of rank 0's rows that was flipped since its digest was published
        (chunk, *others) = sent.manifest.chunks
        wrong = (digest(memoryview(b"other")), *chunk.digests[1:])
        manifest = msgspec.structs.replace(sent.manifest, chunks=(Chunk(chunk.nbytes, wrong), *others))
        ends.sender.abandon()
        where = ends.write(1, model(1)) and ends.send(manifest)
        receiver = ends.receiver()
        # when / then
        with pytest.raises(DigestMismatch, match=r"version 1: bucket 0 of chunk 0 .* it holds up"):
            receiver.fetch_slice(manifest, slice_tensors(manifest, Rank(0)), where, timeout_s=LIMIT_S)
        # and rank 1 has no part in it
        fetched = receiver.fetch_slice(manifest, slice_tensors(manifest, Rank(1)), where, timeout_s=LIMIT_S)
        same(Rank(1).of(model(1)), Update(1, [fetched]))


def test_a_relay_of_a_slice_that_lies_is_left() -> None:
    liar = FakeRelay(lambda: (msgspec.msgpack.encode([b"\0"]), [bytes(BUCKET)]))
    with RelayHosts(fanout=1) as hosts:
        sent = hosts.publish(1, model(1))
        key = cut_slice(sent.manifest, slice_tensors(sent.manifest, Rank(0))).key
        client, _ = hosts.join(sent, "liar", liar.where, key)
        one, other = fetch(hosts, sent, "a", Rank(0)), fetch(hosts, sent, "b", Rank(1))
        (note,) = one().notes
        assert "differs from the published bytes" in note
        assert not other().notes
        client.close()
    liar.service.close()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_ranges_of_tensors_in_pieces_are_found_in_few_buckets(data: st.DataObject) -> None:
    # given tensors of one publishing rank, or in pieces of two, and a range of each
    weights, ranges = dict[str, Any](), dict[str, Any]()
    ranks: tuple[list[tuple[str, Any]], ...] = ([], [])
    for name in data.draw(st.lists(st.sampled_from("abcdef"), unique=True, min_size=1)):
        shape = data.draw(st.tuples(st.integers(1, 40), st.integers(1, 3)))
        weights[name] = np.random.default_rng(len(weights)).integers(0, 1 << 15, shape, np.int16)
        cut = data.draw(st.integers(0, shape[0]))
        for rank, rows in enumerate((slice(0, cut), slice(cut, None))):
            ranks[rank].append((name, Shard(weights[name][rows], (rows.start, 0), shape)))
        first, stop = sorted(data.draw(st.tuples(*[st.integers(0, shape[0])] * 2)))
        ranges[name] = data.draw(st.sampled_from([None, (first, stop)]))
    published = parts(*ranks) if data.draw(st.booleans()) else parts([*weights.items()])
    # when each part is cut, and its buckets are copied
    cuts = []
    for part in published:
        raw = [bytes(chunk) for chunk in part.chunks]
        digests = [tuple(digest(memoryview(each[n : n + 16])) for n in range(0, len(each), 16)) for each in raw]
        chunks = tuple(Chunk(len(each), found) for each, found in zip(raw, digests, strict=True))
        manifest = msgspec.structs.replace(part.manifest, chunks=chunks, bucket_bytes=16)
        cut_part = cut_slice(manifest, slice_tensors(manifest, lambda name, shape: ranges[name]))
        theirs = list(manifest.buckets())
        found = [np.zeros(chunk.nbytes, np.uint8) for chunk in cut_part.manifest.chunks]
        for bucket, number in zip(cut_part.manifest.buckets(), cut_part.numbers, strict=True):
            data_of = raw[theirs[number].chunk][theirs[number].start : theirs[number].stop]
            cut_part.manifest.check(bucket, memoryview(data_of))
            found[bucket.chunk][bucket.start : bucket.stop] = np.frombuffer(data_of, np.uint8)
        cuts.append(Fetched(cut_part.manifest, found))
        # then no bucket is there that no tensor needs
        needed = sum(-(-info.nbytes // 16) + 1 for info in cut_part.manifest.tensors if info.nbytes)
        assert len(cut_part.numbers) <= needed
    # and the tensors are the ranges
    same({name: array[slice(*(ranges[name] or (None,)))] for name, array in weights.items()}, Update(3, cuts))


def test_ranges_and_manifests_that_cannot_be_are_refused() -> None:
    (part,) = parts([("w", np.zeros((4, 2)))])
    for wrong in (lambda *_: (0, 5), lambda *_: (3, 2), lambda *_: (-1, 2)):
        with pytest.raises(ConfigError, match=r"slices returned .* for tensor 'w' of shape \[4, 2\]"):
            slice_tensors(part.manifest, wrong)
    (info,) = part.manifest.tensors
    lying = msgspec.structs.replace(part.manifest, tensors=(msgspec.structs.replace(info, shape=(1 << 50, 2)),))
    with pytest.raises(WeightMismatch, match="tensor 'w': it does not lie in chunk 0"):
        slice_tensors(lying, lambda name, shape: None)


@pytest.mark.parametrize("transport", ["shm", "file"])
def test_with_other_transports_updates_hold_the_same_slices(transport: str, tmp_path: Path) -> None:
    options = {"path": str(tmp_path / "versions")} if transport == "file" else {}
    with af.serve(tmp_path / "run") as run, run.weight_publisher(transport, **options) as publisher:
        publisher.publish(1, model(1)).wait(LIMIT_S)
        with run.weight_updates(slices=Rank(1, 4), timeout_s=LIMIT_S) as updates, next(iter(updates)) as update:
            same(Rank(1, 4).of(model(1)), update)  # type: ignore[arg-type]


# ---- one receiver of two ranks


def test_two_ranks_on_two_hosts_fetch_half_each_and_load_a_version_together_or_not_at_all(tmp_path: Path) -> None:
    with network(3) as net:
        address, directory = f"tcp://{net.address(1)}:7000", str(tmp_path / "run")
        nbytes = sum(array.nbytes for array in model(1, 128).values())
        with Child(train, address, directory, within=net.within(1)) as trainer:
            assert trainer.hear() == "ready"
            key = str(tmp_path / "run" / "run.key")
            with (
                Child(receive, address, key, 0, within=net.within(2)) as one,
                Child(receive, address, key, 1, within=net.within(3)) as other,
            ):
                assert (one.hear(), other.hear()) == ("ready", "ready")
                before = net.link_bytes(1)[1]
                # when a version is published
                trainer.say("publish")
                assert trainer.hear() == 1
                # then both load their slices of it, and one copy has left the publisher's host
                assert (one.hear(), other.hear()) == ([1, True], [1, True])
                assert net.link_bytes(1)[1] - before < 1.25 * nbytes
                # when one cannot load the next, then neither has it, until both have
                trainer.say("publish")
                assert trainer.hear() == 2
                for rank in (one, other):
                    loaded, why = rank.hear()
                    assert loaded == 1
                    assert "rank 1 cannot load it" in why
                assert (one.hear(), other.hear()) == ([2, True], [2, True])
                trainer.say("end")
