"""What the transport ``dist`` holds: memory, descriptors, threads and links, of the versions under way and no more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dist_children import counts, forget_peak, peak_bytes, write
from dist_ends import MB, Crew, Sent, a_receiver, a_sender, sent_by, together

from asyncflow_sdk.types import Chunk, Manifest
from asyncflow_torch.recycled import Recycled


def test_many_versions_leave_nothing_behind(crew: Crew) -> None:
    receivers = crew(2)
    with a_sender(gather_s=0.2) as sender:
        seen = []
        for version in range(1, 31):
            sent = sent_by(sender, version)
            sender.keep([version - 1, version])
            some = receivers if version % 3 else receivers[:1]  # so that groups are made anew
            for each in some:
                each.told(sent)
            for each in some:
                each.got(sent)
            if version in (6, 30):
                for each in receivers:
                    each.child.say({"count": 1})
                seen.append([counts(), *(each.child.hear()[:2] for each in receivers)])
        assert sender._rounds._groups > 10
        assert seen[0] == seen[1]
        assert sender.nbytes <= 3 * (2 * MB + 4096) + MB


def test_memory_is_that_of_the_versions_and_of_a_bucket(crew: Crew) -> None:
    model = 96 * MB
    receivers = crew(2)
    with a_sender() as sender:
        for version in range(1, 7):
            manifest, _ = write(sender, version, model, bucket=4 * MB)
            sent = Sent(manifest, sender.send(manifest), "")
            sender.keep([version - 1, version])
            before = forget_peak()
            together(sender, receivers, sent)
            for each in receivers:
                # then a receiver takes one version, and none once it uses the memory of one that was released
                assert each.answer()["grown"] <= (model if version == 1 else 0) + 24 * MB
            # and the sender's end what is staged (each page of it once it is mapped): broadcasts add nothing of theirs
            assert peak_bytes() - before <= (model if version < 4 else 0) + 24 * MB
        assert sender.nbytes <= 3 * (model + 4096) + MB


def test_a_receiver_that_outlives_its_trainers_keeps_no_link_to_them() -> None:
    files: list[int] = []
    with a_receiver() as receiver:
        for version in range(1, 5):
            with a_sender(gather_s=0.0) as sender:
                sent = sent_by(sender, version)
                receiver.fetch(sent.manifest, sent.where, timeout_s=30.0)
                assert list(receiver._links) == [sent.where]
                link = receiver._links[sent.where]
                receiver.fetch(sent.manifest, sent.where, timeout_s=30.0)
                assert receiver._links[sent.where] is link
                files.append(counts()[0])
        # then they come to be closed: ZeroMQ does it behind
        end = time.monotonic() + 30
        while counts()[0] > files[0]:
            assert time.monotonic() < end, f"{counts()[0]} of {files} are never closed"
            threading.Event().wait(0.01)


@pytest.mark.parametrize(
    "hold",
    [lambda v: v[3:5].view("<u2"), torch.from_numpy, memoryview, lambda v: v],
    ids=["view", "tensor", "buffer", "itself"],
)
def test_memory_is_used_again_only_when_nobody_refers_to_it(hold: Callable[[Any], Any]) -> None:
    manifest = Manifest(1, (), (Chunk(1000), Chunk(2000), Chunk(1000)))
    memory = Recycled()
    first = memory.take(manifest)
    places = {chunk.ctypes.data for chunk in first}
    held = hold(first[1])
    del first
    # when
    second = memory.take(manifest)
    # then
    again = places & {chunk.ctypes.data for chunk in second}
    assert len(again) == 2
    assert all(chunk.flags.writeable for chunk in second)
    del held, second
    assert len({chunk.ctypes.data for chunk in memory.take(manifest)}) == 3
