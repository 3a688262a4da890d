"""RelayPlan: decides from which host each host fetches a version.

    plan = RelayPlan(fanout=2)
    plan.join(7, "host-a", relay_a)           # Assignment(b"", shared=False): from the publisher
    plan.join(7, "host-a", another)           # Assignment(relay_a, shared=True): that host has a relay
    plan.join(7, "host-b", relay_b, failed=relay_a)

The hosts of a version form a tree below the publisher, in the order of their requests: each feeds
up to ``fanout`` hosts. The first requesting process of a host is its relay, for later versions too,
until its connection ends or another process of the host reports its failure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

PUBLISHER = ""
MOST_HOSTS = 4096
"""Limit of hosts in a plan; further ones fetch from the publisher."""
FORGIVE_AFTER = 16
"""Versions after which a host may feed others again after a failure."""


class Assignment(NamedTuple):
    """``source``: address of a relay; b"": the publisher. ``shared``: the relay of the own host."""

    source: bytes
    shared: bool


@dataclass
class _Node:
    """A host in the tree of a version. ``avoided``: failed sources."""

    parent: str
    avoided: set[str] = field(default_factory=set)


class RelayPlan:
    """The trees of a publisher's versions. Not thread-safe."""

    def __init__(self, fanout: int) -> None:
        self._fanout = fanout
        self._relays: dict[str, bytes] = {}
        self._trees: dict[int, dict[str, _Node]] = {}
        self._failures: dict[str, int] = {}  # host → version during which it failed as a source

    def join(self, version: int, host: str, relay: bytes, failed: bytes = b"") -> Assignment:
        """Return where ``relay``, a process of ``host``, gets ``version``. ``failed``: its former
        source, which could not be used."""
        known = self._relays.get(host)
        if known not in (None, relay, failed):
            return Assignment(known or b"", True)
        if known is None and len(self._relays) >= MOST_HOSTS:
            return Assignment(b"", False)
        self._relays[host] = relay
        tree = self._trees.setdefault(version, {})
        node = tree.setdefault(host, _Node(PUBLISHER))
        if failed and node.parent != PUBLISHER and self._relays.get(node.parent) == failed:
            node.avoided.add(node.parent)
            self._failures[node.parent] = version
        node.parent = self._choose_parent(version, host, node)
        return Assignment(self._relays.get(node.parent, b""), False)

    def leave(self, relay: bytes) -> None:
        """Forget a relay that has ended."""
        for host in [host for host, known in self._relays.items() if known == relay]:
            del self._relays[host]
            for tree in self._trees.values():
                tree.pop(host, None)

    def keep(self, versions: Collection[int]) -> None:
        """Forget the trees of all other versions."""
        self._trees = {number: tree for number, tree in self._trees.items() if number in versions}

    def _choose_parent(self, version: int, host: str, node: _Node) -> str:
        """Return the first host of the tree with a free place, the nearest to the publisher."""
        tree = self._trees[version]
        unfit = {each for each in tree if version - self._failures.get(each, version - FORGIVE_AFTER) < FORGIVE_AFTER}
        children = Counter(each.parent for name, each in tree.items() if name != host and name not in unfit)
        for candidate in (PUBLISHER, *tree):
            if candidate in unfit or candidate in node.avoided or children[candidate] >= self._fanout:
                continue
            if not self._is_below(tree, candidate, host):
                return candidate
        return PUBLISHER

    def _is_below(self, tree: dict[str, _Node], candidate: str, host: str) -> bool:
        """True if a host is ``host``, or gets its bytes through it."""
        while candidate != PUBLISHER and candidate in tree:
            if candidate == host:
                return True
            candidate = tree[candidate].parent
        return False
