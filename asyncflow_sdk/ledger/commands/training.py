"""What a trainer says of the steps that it has kept for good, and of those that it trains again; and where its ranks meet."""

from __future__ import annotations

from .roots import Command, Reply


class Checkpoint(Command, frozen=True, tag="checkpoint"):
    """The training engine's state before ``step`` is kept for good. Steps before ``covers`` will never be trained again: their
    rows end, and their memory is free. Every step before ``step`` has been acknowledged. ``version``: of the weights in it; -1
    where none is known. Checkpoints before ``covers`` are not kept."""

    step: int
    covers: int
    version: int = -1


class Resume(Command, frozen=True, tag="resume"):
    """A trainer goes on with ``step``: it has loaded the state of that checkpoint, or, for step 0, it begins anew. Answered with
    ``Resumed``. Every step from there on that was filled will be leased (again), whole, in order, with the same rows; who holds
    one loses it. ``version``: that ``step`` was to train when the checkpoint was made; -1 where none was known. Versions
    published since are lost; what they generated keeps its place."""

    step: int
    version: int = -1


class Resumed(Reply, frozen=True, tag="resumed"):
    """``step`` is the next to be leased, and trains ``version``. ``publish``: whether the trainer's weights are to be published
    under that number first. ``again``: how many rows of acknowledged steps will be trained once more."""

    step: int
    version: int
    publish: bool
    again: int


class GetCut(Command, frozen=True, tag="get_cut"):
    """Ask where training is. Answered with ``Cut``."""


class Cut(Reply, frozen=True, tag="cut"):
    """``step``: the first that is not acknowledged, which trains ``version`` (-1 before the first is published). ``covered``:
    steps before it are final. ``put``: rows put so far. ``checkpoints``: whether rows live on until one covers them.
    ``restore``: the version of a rollback that the trainer has not loaded yet; -1 without one."""

    step: int
    version: int
    covered: int
    put: int
    checkpoints: bool
    restore: int = -1


class Meet(Command, frozen=True, tag="meet"):
    """A rank has come to ``what``, and goes on when every rank of ``team`` has. Answered with ``Met``. Whoever joined last in a
    rank's name is that rank. ``word``: for the others."""

    team: str
    what: str
    rank: int
    world_size: int
    word: bytes = b""
    timeout_s: float = 0.0


class Met(Reply, frozen=True, tag="met"):
    """All are there. ``words``: of each rank."""

    words: tuple[bytes, ...]
