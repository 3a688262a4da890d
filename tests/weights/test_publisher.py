"""A trainer's publisher: held for a copy, never stuck, and whatever goes wrong leaves the version before current."""

import re
import signal
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from children import Child
from publisher_runs import LIMIT_S, Gated, Served, crash_while_publishing, full, publish_a_half, until, value_of

import asyncflow_sdk as af
from asyncflow_sdk.errors import (
    ConfigError,
    DeadlineExceeded,
    MemoryFull,
    PluginError,
    SchemaError,
    ServerLost,
    VersionGone,
    WeightError,
    WeightMismatch,
)
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.queue._once import drive
from asyncflow_sdk.types import Manifest, Probe, Shard
from asyncflow_sdk.types.events import Note, Published, Span
from asyncflow_sdk.weights import Staged, WeightPublisher, publisher
from asyncflow_sdk.weights.shm import ShmSender

PROBE = Probe(((1,),), ((2,),), ((-0.5,),))


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.close()


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> Gated:
    gated = Gated()
    monkeypatch.setattr(publisher, "transport_named", lambda name, **options: gated)
    return gated


def test_what_is_published_is_what_replicas_get(served: Served) -> None:
    # given
    trainer = WeightPublisher(served.client(), dtype="bfloat16", rename=lambda name: f"model.{name}")
    weights = {"w": torch.randn(300, 200), "steps": torch.arange(5)}
    # when
    publication = trainer.publish(np.int64(3), weights.items(), probe=PROBE)  # type: ignore[arg-type]
    manifest = publication.wait(LIMIT_S)
    # then
    update = served.newest()
    got = dict(update)
    assert publication.done
    assert (update.version, trainer.current, manifest.version) == (3, 3, 3)
    assert list(got) == ["model.w", "model.steps"]
    assert torch.equal(got["model.w"], weights["w"].to(torch.bfloat16))
    assert torch.equal(got["model.steps"], weights["steps"])
    assert update.root == manifest.root
    assert manifest.digested
    trainer.close()
    (span,) = [event for event in served.events if isinstance(event, Span)]
    assert (span.kind, span.version, span.worker) == ("publish", 3, "trainer")
    assert [event.version for event in served.events if isinstance(event, Published)] == [3]


@pytest.mark.parametrize(
    ("dtype", "message"),
    [("int8", "not 'int8'"), ("bf16", "say 'bfloat16'"), ("bfloat6", "say 'bfloat16'"), (torch.float16, "say 'float16'"), (7, "not 7")],
)  # fmt: skip
def test_a_dtype_that_weights_are_not_published_in_is_refused_before_anything_else(
    served: Served, dtype: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        WeightPublisher(served.client(), dtype=dtype)
    with pytest.raises(ConfigError, match=message):
        af.Weights(dtype=dtype)
    WeightPublisher(served.client("next"), dtype="float8_e4m3fn").close()  # nothing was taken


@pytest.mark.parametrize(
    ("probe", "message"),
    [
        ({"prompt_ids": [[0]]}, "a probe is an af.Probe.*not dict"),
        (Probe(((0,),), ((1, 2),)), r"responses of \[2\] tokens and log-probs of \[\]"),
        (Probe(((0,), (1,)), ((1, 2), (1,)), ((0.1, 0.2), (0.1, 0.1))), r"responses of \[2, 1\] tokens and log-probs of \[2, 2\]"),
        (Probe(((0,), (1,)), ((1, 2),), ((0.1, 0.2),)), "as many prompts as responses"),
        (Probe((("a",),), ((1,),), ((0.1,),)), "`int`, got `str` - at `prompt_ids"),  # type: ignore[arg-type]
        (Probe(((0,),), ((1,),), ((0.1,),), float("nan")), "tolerance is 0 or more, not nan"),
    ],
)  # fmt: skip
def test_a_probe_that_no_engine_can_be_compared_with_is_refused(served: Served, probe: Any, message: str) -> None:
    with WeightPublisher(served.client()) as trainer:
        with pytest.raises(ConfigError, match=message):
            trainer.publish(1, [("w", np.ones(3))], probe=probe)
        trainer.publish(1, [("w", np.ones(3))], probe=PROBE).wait(LIMIT_S)  # the number is still to be had


@pytest.mark.parametrize("version", ["1", 1.7, True, -1, None, 1 << 70, np.float32(1)])
def test_the_number_of_a_version_is_a_whole_number(served: Served, version: Any) -> None:
    with WeightPublisher(served.client()) as trainer:
        trainer.publish(np.int64(0), {"w": np.ones(3)}).wait(LIMIT_S)  # type: ignore[arg-type]
        for act in (lambda: trainer.publish(version, {"w": np.ones(3)}), lambda: trainer.rollback(version)):
            with pytest.raises(ConfigError, match=rf"an int of 0 or more, not {re.escape(repr(version))}$"):
                act()


def test_a_tensor_is_let_go_before_the_next_is_asked_for(served: Served) -> None:
    before: list[weakref.ref[Any]] = []

    def gathered() -> Iterator[tuple[str, Any]]:
        for number in range(4):
            assert [each for each in before if each() is not None] == []
            tensor = torch.ones(8)
            before.append(weakref.ref(tensor))
            yield f"w{number}", tensor
            del tensor

    with WeightPublisher(served.client()) as trainer:
        trainer.publish(1, gathered()).wait(LIMIT_S)
        assert len(before) == 4


def test_weights_may_be_a_mapping(served: Served) -> None:
    with WeightPublisher(served.client()) as trainer:
        manifest = trainer.publish(1, torch.nn.Linear(2, 3).state_dict()).wait(LIMIT_S)
        assert [tensor.name for tensor in manifest.tensors] == ["weight", "bias"]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (None, "version 1: weights are a mapping of names to tensors.*, not None$"),
        (torch.nn.Linear(2, 3), "not a Linear$"),
        (lambda: [("w", np.ones(3))], "not a function$"),
        ("w", "not 'w'$"),
        ([("w", np.ones(3)), ("b", np.ones(3), 1)], "item 1 is a tuple of 3$"),
        (["ab"], "item 0 is 'ab'$"),
        ([np.ones(2)], "item 0 is a ndarray$"),
        (7, "not a int$"),
    ],
)
def test_weights_of_another_shape_are_refused_and_leave_the_number_free(
    served: Served, weights: Any, message: str
) -> None:
    with WeightPublisher(served.client()) as trainer:
        with pytest.raises(ConfigError, match=message):
            trainer.publish(1, weights)
        trainer.publish(1, {"w": np.ones(3)}).wait(LIMIT_S)


def test_a_probe_may_be_given_in_arrays(served: Served) -> None:
    probe: Any = Probe([np.arange(2)], torch.ones(1, 2, dtype=torch.int64), [np.array([-1.0, -2.0], np.float32)], 1)  # type: ignore[arg-type]
    with WeightPublisher(served.client()) as trainer:
        trainer.publish(1, [("w", np.ones(3))], probe=probe).wait(LIMIT_S)
        told = drive(served.client("replica")._port.send(cmd.AwaitVersion(after=-1)))
        assert Staged(told, [], None).probe == Probe(((0, 1),), ((1, 1),), ((-1.0, -2.0),), 1.0)


def test_weights_may_change_as_soon_as_publish_returns(served: Served, transport: Gated) -> None:
    # given a delivery that takes its time
    trainer, weights = WeightPublisher(served.client()), torch.zeros(1 << 20)
    transport.gate.clear()
    publication = trainer.publish(1, [("w", weights)])
    # when
    weights.fill_(7)
    assert not publication.done
    transport.gate.set()
    publication.wait(LIMIT_S)
    # then
    assert value_of(served.newest()) == 0.0
    trainer.close()


def test_without_digests_nothing_is_hashed(served: Served) -> None:
    with WeightPublisher(served.client(), digests=False) as trainer:
        manifest = trainer.publish(1, full(1)).wait(LIMIT_S)
        assert not any(chunk.digests for chunk in manifest.chunks)
        assert value_of(served.newest()) == 1.0


@pytest.mark.parametrize(
    ("problem", "error", "reason"),
    [
        (OSError(5, "the disk is gone"), WeightError,
         "version 2 failed while it was being sent through transport 'shm': OSError: .*the disk is gone"),
        (MemoryFull("no room"), MemoryFull, "version 2 failed while it was being sent through transport 'shm': no room"),
    ],
)  # fmt: skip
def test_an_error_says_of_which_version_and_when(
    served: Served, transport: Gated, problem: Exception, error: type[Exception], reason: str
) -> None:
    with WeightPublisher(served.client()) as trainer:
        transport.problem = problem
        publication = trainer.publish(2, full(2))
        for _ in range(2):
            with pytest.raises(error, match=reason):
                publication.wait(LIMIT_S)


@pytest.mark.parametrize("hears", ["publish", "flush", "close", "wait"])
def test_what_goes_wrong_behind_is_raised_in_front(served: Served, transport: Gated, hears: str) -> None:
    # given a version that cannot be delivered
    trainer = WeightPublisher(served.client())
    trainer.publish(1, full(1)).wait(LIMIT_S)
    transport.problem = MemoryFull("version 2: no room")
    publication = trainer.publish(2, full(2))
    # when
    with pytest.raises(MemoryFull, match="version 2: no room"):
        {
            "publish": lambda: trainer.publish(3, full(3)), "flush": trainer.flush, "close": trainer.close,
            "wait": publication.wait,
        }[hears]()  # fmt: skip
    # then the version before is current, and the next comes, under the same number too
    assert value_of(served.newest()) == 1.0
    if hears == "close":
        trainer = WeightPublisher(served.client("another"))
    trainer.flush()
    trainer.publish(2, full(2.5)).wait(LIMIT_S)
    assert value_of(served.newest()) == 2.5
    trainer.close()


def test_a_delivery_that_does_not_end_holds_the_next_up_for_so_long(served: Served, transport: Gated) -> None:
    # given
    trainer = WeightPublisher(served.client(), timeout_s=0.05)
    transport.gate.clear()
    publication = trainer.publish(1, full(1))
    assert transport.sending.wait(LIMIT_S)
    # when / then
    reason = "version 1 is not published after 0.05 s: it is being sent through transport 'shm'"
    for what, call in (
        ("version 2 cannot be published yet: ", lambda: trainer.publish(2, full(2))),
        ("version 1 cannot be rolled back to yet: ", lambda: trainer.rollback(1)),
        ("not everything is published: ", trainer.flush),
        ("", lambda: publication.wait(0.05)),
    ):
        with pytest.raises(DeadlineExceeded, match=f"^{re.escape(what + reason)}"):
            call()
    # and once it is through, the next goes on
    transport.gate.set()
    publication.wait(LIMIT_S)
    trainer.publish(2, full(2)).wait(LIMIT_S)
    assert value_of(served.newest()) == 2.0
    trainer.close()


def interrupted() -> Iterator[tuple[str, Any]]:
    yield "w", np.zeros(10)
    raise KeyboardInterrupt


def broken() -> Iterator[tuple[str, Any]]:
    yield "w", np.zeros(10)
    raise RuntimeError("the engine broke")


@pytest.mark.parametrize(
    ("weights", "error", "reason"),
    [
        (interrupted, KeyboardInterrupt, None),
        (broken, RuntimeError, "the engine broke"),
        (lambda: [], WeightMismatch, "version 2 has no tensors"),
        (lambda: [*full(2), *full(2)], WeightMismatch, "version 2: tensor 'w' is sent twice"),
        (lambda: [("w", np.array([object()]))], SchemaError, "version 2: tensor 'w': numpy dtype object"),
    ],
)
def test_a_version_that_cannot_be_written_leaves_the_one_before(
    served: Served, weights: Any, error: type[BaseException], reason: str | None
) -> None:
    # given
    trainer = WeightPublisher(served.client())
    trainer.publish(1, full(1)).wait(LIMIT_S)
    # when
    for _ in range(3):
        with pytest.raises(error, match=reason):
            trainer.publish(2, weights())
    # then it is withdrawn, and its number free
    assert served.server.ledger.announced is None
    assert value_of(served.newest()) == 1.0
    trainer.publish(2, full(2)).wait(LIMIT_S)
    assert value_of(served.newest()) == 2.0
    trainer.close()


def test_a_real_interrupt_withdraws_the_version(served: Served) -> None:
    # given
    trainer = WeightPublisher(served.client())

    def weights() -> Iterator[tuple[str, Any]]:
        yield from full(1)
        signal.raise_signal(signal.SIGINT)
        yield "never", np.zeros(3)

    # when
    with pytest.raises(KeyboardInterrupt):
        trainer.publish(1, weights())
    # then
    assert served.server.ledger.announced is None
    trainer.publish(1, full(1)).wait(LIMIT_S)
    trainer.close()


def test_a_number_that_was_used_is_refused_before_anything_is_copied(served: Served) -> None:
    trainer, asked = WeightPublisher(served.client()), []

    def weights() -> Iterator[tuple[str, Any]]:
        asked.append(True)
        yield from full(9)

    trainer.publish(5, full(5))
    for version in (5, 4, 0):
        with pytest.raises(ConfigError, match=f"version {version} cannot be published: 5 is already current"):
            trainer.publish(version, weights())
    assert not asked
    assert value_of(served.newest()) == 5.0
    trainer.close()


def test_one_publisher_at_a_time(served: Served) -> None:
    first = WeightPublisher(served.client("first"))
    first.publish(1, full(1)).wait(LIMIT_S)
    with pytest.raises(ConfigError, match=r"first .*one publisher at a time"):
        WeightPublisher(served.client("second"))
    first.close()
    first.close()
    with pytest.raises(ConfigError, match="version 2: this publisher is closed"):
        first.publish(2, full(2))
    second = WeightPublisher(served.client("third"))
    assert second.current == 1
    second.publish(2, full(2)).wait(LIMIT_S)
    assert value_of(served.newest()) == 2.0
    second.close()


def test_a_publisher_that_was_not_closed_ends_with_its_connection(served: Served) -> None:
    queue = served.client("first")
    WeightPublisher(queue).publish(1, full(1)).wait(LIMIT_S)
    queue._port.connection.close()
    with WeightPublisher(served.client("second")) as second:
        second.publish(2, full(2)).wait(LIMIT_S)


def test_rolled_back_the_old_bytes_are_current(served: Served) -> None:
    # given
    trainer = WeightPublisher(served.client())
    for version in (1, 2):
        trainer.publish(version, full(version))
    # when
    number = trainer.rollback(1, "the loss rose")
    # then
    assert (number, trainer.current) == (3, 3)
    assert value_of(served.newest()) == 1.0
    trainer.publish(4, full(4)).wait(LIMIT_S)
    assert trainer.rollback(3) == 5
    assert value_of(served.newest()) == 1.0
    with pytest.raises(ConfigError, match="version 2 is not kept any more"):
        trainer.rollback(2)
    trainer.close()


def test_a_server_that_is_gone_is_said(served: Served) -> None:
    trainer = WeightPublisher(served.client())
    trainer.publish(1, full(1)).wait(LIMIT_S)
    served.server.close()
    trainer._connection.wire.close()
    with pytest.raises(ServerLost):
        trainer.publish(2, full(2))
    trainer.close()


def test_transports_and_options_that_are_not_there_are_refused(served: Served) -> None:
    with pytest.raises(PluginError, match="no transport adapter is named 'nonsense'"):
        WeightPublisher(served.client(), "nonsense")
    with pytest.raises(ConfigError, match="transport 'shm' has no option 'port'; it has none"):
        WeightPublisher(served.client(), port=7)
    with pytest.raises(ConfigError, match="not in sight of this process"):
        WeightPublisher(served.client(shared_memory=False))
    for rank, size in ((1, 1), (-1, 2)):
        with pytest.raises(ConfigError, match=f"rank {rank} of {size} cannot publish"):
            WeightPublisher(served.client(), rank=rank, world_size=size)
    WeightPublisher(served.client()).close()  # none of them took the role


def test_memory_is_that_of_what_is_kept_and_one_more(served: Served) -> None:
    # given
    model = [("a", np.zeros(3 << 20, np.uint8)), ("b", np.zeros(5 << 20, np.uint8))]
    nbytes = 8 << 20
    served.client("admin").configure(keep_versions=3)
    trainer = WeightPublisher(served.client())
    for version in range(1, 12):
        trainer.publish(version, model).wait(LIMIT_S)
        trainer._stop_preparing()
        if version == 4:
            reading = served.newest()  # a laggard, for ever
        assert trainer.nbytes == served.held() <= (3 + 1 + (version > 4)) * nbytes + (1 << 20)
    reading.release()
    for version in range(12, 15):
        trainer.publish(version, model).wait(LIMIT_S)
    trainer._stop_preparing()
    assert trainer.nbytes == served.held() <= (3 + 1) * nbytes + (1 << 20)
    trainer.close()


def test_publishers_that_are_killed_leave_no_more_than_one_does(served: Served) -> None:
    count, model = 1 << 20, 4 << 20
    for crash in range(10):
        first = 1 + 3 * crash
        with Child(crash_while_publishing, served.address, first, count) as child:
            # given a publisher that goes on after one that was killed
            assert child.hear() <= 5 * model
            assert value_of(served.newest()) == first + 1
            # when
            child.kill()
        # then what is current stays so
        assert value_of(served.newest()) == first + 1
        assert served.held() <= 5 * model + (10 << 20)
    with WeightPublisher(served.client()) as trainer:
        for version in range(100, 104):
            trainer.publish(version, full(version, count)).wait(LIMIT_S)
        trainer._stop_preparing()
        assert served.held() == trainer.nbytes <= 3 * model + (1 << 20)


def test_ranks_publish_one_version_together(served: Served) -> None:
    with Child(publish_a_half, served.address, 0) as zero, Child(publish_a_half, served.address, 1) as one:
        assert [zero.hear(), one.hear()] == ["ready", "ready"]
        for version in (1, 2, 3):
            zero.say(version)
            assert zero.hear() == "published"
            one.say(version)
            assert one.hear() == "published"
            update = served.newest()
            assert (update.version, value_of(update), update.tensors["w"].shape) == (version, version, (10,))
        # when one of them is killed in the middle
        zero.say(4)
        assert zero.hear() == "published"  # its part
        one.say(-4)
        assert one.hear() == "in the middle"
        one.kill()
        # then nothing became current, and the other learns who is to blame
        zero.say(4)
        assert value_of(served.newest()) == 3.0
        with Child(publish_a_half, served.address, 1) as next_one:
            assert next_one.hear() == "ready"
            next_one.say(4)
            assert [zero.hear(), next_one.hear()] == ["published", "published"]
            assert value_of(served.newest()) == 4.0
            # and the one that is killed before the other has finished its part
            zero.say(-5)
            next_one.say(-5)
            assert [zero.hear(), next_one.hear()] == ["in the middle", "in the middle"]
            next_one.kill()
            until(lambda: 1 not in served.server.ledger.publisher, "the end of rank 1 is noticed")
            zero.say("go on")
            assert re.match(r"VersionGone: version 5 .*rank 1 \(rank1\) died", zero.hear())
            assert value_of(served.newest()) == 4.0
        zero.say(None)
        assert zero.hear() == "closed"


def test_a_rank_may_own_nothing(served: Served) -> None:
    ranks = [WeightPublisher(served.client(f"rank{rank}"), rank=rank, world_size=2) for rank in range(2)]
    threads = [
        threading.Thread(target=lambda r=r, w=w: ranks[r].publish(1, w).wait(LIMIT_S))  # type: ignore[misc]
        for r, w in enumerate(([("w", Shard(np.ones(3), (0,), (3,)))], []))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert value_of(served.newest()) == 1.0
    for each in ranks:
        each.close()


def test_what_was_withdrawn_elsewhere_is_said(served: Served, transport: Gated) -> None:
    """A run may be rolled back by somebody else while a version is on its way."""
    trainer = WeightPublisher(served.client())
    for version in (1, 2):
        trainer.publish(version, full(version)).wait(LIMIT_S)
    transport.gate.clear()
    transport.sending.clear()
    publication = trainer.publish(3, full(3))
    assert transport.sending.wait(LIMIT_S)
    from asyncflow_sdk.queue._once import drive

    drive(served.client("admin")._port.send(cmd.Rollback(version=1)))
    transport.gate.set()
    with pytest.raises((VersionGone, ConfigError), match="version 3"):
        publication.wait(LIMIT_S)
    assert value_of(served.newest()) == 1.0
    trainer.publish(5, full(5)).wait(LIMIT_S)
    trainer.close()


def test_a_part_of_a_version_that_another_rank_withdrew_is_said_to_be_lost(served: Served) -> None:
    # given rank 1, whose part is there, and rank 0 that fails in the middle of its own
    ranks = [
        WeightPublisher(served.client(f"rank{rank}"), rank=rank, world_size=2, timeout_s=LIMIT_S) for rank in (0, 1)
    ]
    before = [rank.publish(1, [(name, np.ones(3))]) for rank, name in zip(ranks, "wx", strict=True)]
    for each in before:
        each.wait(LIMIT_S)
    lost = ranks[1].publish(2, [("x", np.full(3, 2.0))])
    lost.wait(LIMIT_S)
    with pytest.raises(RuntimeError, match="the engine broke"):
        ranks[0].publish(2, broken())
    # when it hears of it: with the next version, which comes under the same number
    again = [rank.publish(2, [(name, np.full(3, 2.5))]) for rank, name in zip(reversed(ranks), "xw", strict=True)]
    # then
    for _ in range(2):
        with pytest.raises(WeightError, match="^version 2 was withdrawn by rank0: RuntimeError: the engine broke$"):
            lost.wait(LIMIT_S)
    for each in (*before, *again):
        each.wait(LIMIT_S)
    assert value_of(served.newest()) == 2.5
    ranks[0].publish(3, [("w", np.ones(3))]).wait(LIMIT_S)  # and whose version came to be hears nothing
    again[1].wait(LIMIT_S)
    for rank in ranks:
        rank.close()


def test_what_a_publisher_before_spoilt_is_passed_over() -> None:
    plain = msgspec.msgpack.encode(Manifest(1, (), ()))
    endless = bytes([plain[0] + 1]) + plain[1:] + b"\x91" * 100_000  # in a field that nobody knows
    for spoilt in (b"", b"\xc1", b"\x91\xa1\xff", plain[:-1], endless):
        assert publisher._readable(spoilt) is None
    assert publisher._readable(plain) == Manifest(1, (), ())


class Lost:
    """The port of a publisher whose next Publish is answered by nobody; whether it arrives is to be said."""

    def __init__(self, trainer: WeightPublisher, *, arrives: bool) -> None:
        self._send, self._arrives = trainer._port.send, arrives
        trainer._port.send = self.send  # type: ignore[method-assign]

    async def send(self, command: Any) -> Any:
        if not isinstance(command, cmd.Publish):
            return await self._send(command)
        if self._arrives:
            await self._send(command)
        raise ServerLost("the server does not answer")


@pytest.mark.parametrize("number", [2, 3])
def test_the_trainer_goes_on_after_a_publish_that_never_arrived(served: Served, number: int) -> None:
    # given
    trainer = WeightPublisher(served.client())
    trainer.publish(1, full(1)).wait(LIMIT_S)
    send = trainer._port.send
    Lost(trainer, arrives=False)
    with pytest.raises(ServerLost, match=r"version 2 .*told to the server.*Nobody knows whether it is current"):
        trainer.publish(2, full(2)).wait(LIMIT_S)
    trainer._port.send = send  # type: ignore[method-assign]
    # when / then
    trainer.publish(number, full(number)).wait(LIMIT_S)
    assert (trainer.current, value_of(served.newest())) == (number, number)
    trainer.close()


def test_a_version_whose_answer_was_lost_is_known_to_be_current(served: Served) -> None:
    # given
    trainer = WeightPublisher(served.client())
    trainer.publish(1, full(1)).wait(LIMIT_S)
    send = trainer._port.send
    Lost(trainer, arrives=True)
    with pytest.raises(ServerLost):
        trainer.publish(2, full(2)).wait(LIMIT_S)
    trainer._port.send = send  # type: ignore[method-assign]
    # when it is published again
    with pytest.raises(ConfigError, match="2 is already current"):
        trainer.publish(2, full(2.5))
    # then
    assert (trainer.current, value_of(served.newest())) == (2, 2)
    trainer.publish(3, full(3)).wait(LIMIT_S)
    assert value_of(served.newest()) == 3.0
    trainer.close()
    (note,) = [event.text for event in served.events if isinstance(event, Note)]
    assert note == "version 2 is current: only the server's answer was lost"


def test_what_cannot_be_freed_is_no_reason_to_have_no_version(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a file system that takes nothing away
    trainer = WeightPublisher(served.client())
    trainer.publish(1, full(1)).wait(LIMIT_S)

    def stale(sender: Any, versions: Any) -> None:
        raise OSError(116, "Stale file handle")

    # when
    with monkeypatch.context() as patched:
        patched.setattr(ShmSender, "keep", stale)
        trainer.publish(2, full(2)).wait(LIMIT_S)
    # then
    assert (trainer.current, value_of(served.newest())) == (2, 2)
    trainer.publish(3, full(3)).wait(LIMIT_S)
    assert value_of(served.newest()) == 3.0
    trainer.close()
    notes = [(event.level, event.text) for event in served.events if isinstance(event, Note)]
    assert len(notes) == 2  # before it is written, and after
    for level, text in notes:
        assert level == "warning"
        assert re.match(r"memory of versions .*not free yet: OSError: .*Stale file handle", text)


@pytest.mark.parametrize("queued", [False, True])
def test_a_publisher_that_closes_gives_up_what_is_late(served: Served, transport: Gated, queued: bool) -> None:
    # given a version whose delivery does not end, or does not even begin
    queue, held = served.client(), threading.Event()
    trainer = WeightPublisher(queue, timeout_s=0.05)
    if queued:
        trainer._background.submit(held.wait, LIMIT_S)
    transport.gate.clear()
    publication = trainer.publish(1, full(1))
    assert queued or transport.sending.wait(LIMIT_S)
    # when
    with pytest.raises(DeadlineExceeded, match="version 1 is not published after 0.05 s"):
        trainer.close()
    # then
    for _ in range(2):
        with pytest.raises(WeightError, match="version 1 failed while it was .*: the publisher was closed"):
            publication.wait(LIMIT_S)
    # and what the thread still does harms nobody who publishes on the same connection
    with WeightPublisher(queue) as second:
        transport.gate.set()
        held.set()
        trainer._background.shutdown()
        second.publish(1, full(1.5)).wait(LIMIT_S)
        assert value_of(served.newest()) == 1.5
    with pytest.raises(WeightError, match="the publisher was closed"):
        publication.wait(LIMIT_S)


def test_ranks_go_on_after_one_of_them_failed_alone(served: Served) -> None:
    # given rank 0 that fails before rank 1 begins, and rank 1 that publishes its part nevertheless
    ranks = [
        WeightPublisher(served.client(f"rank{rank}"), rank=rank, world_size=2, timeout_s=LIMIT_S) for rank in (0, 1)
    ]
    with pytest.raises(RuntimeError, match="the engine broke"):
        ranks[0].publish(1, broken())
    alone = ranks[1].publish(1, [("x", np.full(3, 1.0))])
    alone.wait(LIMIT_S)
    # when
    parts = [
        rank.publish(2, [(name, np.full(3, 2.0))]) for rank, name in zip(ranks, "wx", strict=True)
    ]  # one after the other: neither waits for version 1
    # then version 2 is there from both, and rank 1 and the run were told why version 1 is not
    for part in parts:
        part.wait(LIMIT_S)
    for _ in range(2):
        with pytest.raises(WeightError, match=r"^version 1 was withdrawn: rank 0 \(rank0\) announced 2 .*broke"):
            alone.wait(LIMIT_S)
    assert value_of(served.newest()) == 2.0
    for each in ranks:
        each.close()
    notes = [event.text for event in served.events if isinstance(event, Note)]
    assert notes == [
        "version 1 was withdrawn by rank0: RuntimeError: the engine broke",
        notes[0].join(["version 1 was withdrawn: rank 0 (rank0) announced 2 in its place; ", ""]),
    ]
