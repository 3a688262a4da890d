"""Checks of weight transports: each of ``check_transport``, with its impact."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..transport_harness import TransportHarness
from ..transports import TRANSPORT_CHECKS
from .check import Tier, check
from .plain_lab import PlainLab


class _Meaning(NamedTuple):
    tier: Tier
    impact: str
    hint: str


_MEANINGS = {
    "every_bit": _Meaning("basic", "replicas hold other weights than the published ones", "dtypes, shapes, tied names and pieces: bytes are moved, not converted"),
    "boundaries": _Meaning("basic", "a tensor is cut or shifted where a bucket or a chunk ends", "off-by-one at the ends of buckets and chunks"),
    "versions": _Meaning("basic", "a replica is given a version that is not whole, or memory grows with every version", "keep(): named versions must stay, others may be reused"),
    "abandoned": _Meaning("full", "a trainer that dies while it publishes takes the next publication with it", "abandon(): as if the version had never been begun"),
    "held_for_ever": _Meaning("full", "one slow replica holds up the trainer", "room() and keep() never wait for receivers"),
    "written_into": _Meaning("full", "an engine that works in place changes what other replicas load", "the chunks of fetch() must be private: private maps or copies"),
    "flipped": _Meaning("basic", "corrupted weights are loaded, and nobody knows", "fetch(): compare every bucket's digest before the return"),
    "undigested": _Meaning("full", "versions published without digests cannot be fetched", "a manifest without digests passes"),
    "from_base": _Meaning("full", "deltas are applied to the wrong version, or half", "fetch(base=): the result shares no memory with the base"),
    "together": _Meaning("full", "replicas that fetch at the same time get each other's bytes, or wait for each other", "state shared by receivers"),
    "interrupted": _Meaning("full", "a replica fetches an outdated version to its end, and is late for the newest", "interrupt(): end the fetch under way with an error"),
    "closed": _Meaning("full", "memory and sockets of ended runs stay", "close(): idempotent; fetched versions stay valid"),
    "adopted": _Meaning("full", "after a restart of the trainer its published versions are gone", "adopt(): take over the versions of the previous sender"),
    "strange_places": _Meaning("full", "bytes from another process make a replica crash, read other files, or run code", "fetch(): `where` is validated before it is used"),
}  # fmt: skip


def _register() -> None:
    for name, ask in TRANSPORT_CHECKS.items():
        meaning = _MEANINGS[name]

        def body(lab: PlainLab, ask: object = ask) -> None:
            """Run the check on a new harness."""
            with TransportHarness(lab.made, lab.factory) as ends:
                ends.random = np.random.default_rng(0)
                ask(ends)  # type: ignore[operator]

        body.__name__, body.__doc__ = name, ask.__doc__
        after = () if name == "every_bit" else ("every_bit",)
        check("transport", meaning.tier, impact=meaning.impact, hint=meaning.hint, after=after)(body)


_register()
