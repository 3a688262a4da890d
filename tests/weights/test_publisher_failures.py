"""A publisher when something goes wrong: the version before stays current, and whoever asks hears what and when."""

import re
import signal
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from publisher_runs import LIMIT_S, Gated, Served, broken, full, value_of

from asyncflow_sdk.errors import (
    ConfigError,
    DeadlineExceeded,
    MemoryFull,
    SchemaError,
    ServerLost,
    VersionGone,
    WeightError,
    WeightMismatch,
)
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.queue._once import drive
from asyncflow_sdk.types import Manifest
from asyncflow_sdk.types.events import Note
from asyncflow_sdk.weights import WeightPublisher, publisher, restored
from asyncflow_sdk.weights.shm import ShmSender


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


def test_a_server_that_is_gone_is_said(served: Served) -> None:
    trainer = WeightPublisher(served.client())
    trainer.publish(1, full(1)).wait(LIMIT_S)
    served.server.close()
    trainer._connection.wire.close()
    with pytest.raises(ServerLost):
        trainer.publish(2, full(2))
    trainer.close()


def test_what_was_withdrawn_elsewhere_is_said(served: Served, transport: Gated) -> None:
    """A run may be rolled back by somebody else while a version is on its way."""
    trainer = WeightPublisher(served.client())
    for version in (1, 2):
        trainer.publish(version, full(version)).wait(LIMIT_S)
    transport.gate.clear()
    transport.sending.clear()
    publication = trainer.publish(3, full(3))
    assert transport.sending.wait(LIMIT_S)
    drive(served.client("admin")._port.send(cmd.Rollback(version=1)))
    transport.gate.set()
    with pytest.raises((VersionGone, ConfigError), match="version 3"):
        publication.wait(LIMIT_S)
    assert value_of(served.newest()) == 1.0
    restored(served.client(), 4)
    trainer.publish(5, full(5)).wait(LIMIT_S)
    trainer.close()


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
