"""RayStore: one object of Ray for each block, owned by a detached actor on the writer's node."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncflow_blocks import BlockMemory, BlockPayloadStore, BlockRead, BlockStore
from asyncflow_sdk.errors import ConfigError, LeaseLost, MemoryFull, StoreUnavailable
from asyncflow_sdk.interfaces import StoreContext

from .block_owner import BlockOwner

NAMESPACE = "asyncflow"
CALL_S = 60.0
PORT_S = 2.0
_connecting = threading.Lock()


def ray_store(context: StoreContext, **options: Any) -> BlockPayloadStore:
    """Return the store of a connection. ``options``: of ``RayStore``."""
    return BlockPayloadStore("ray", RayStore(context, **options), context)


def connect(address: str) -> None:
    """Connect this process to a running Ray, unless it is. Raises StoreUnavailable."""
    with _connecting:
        if ray.is_initialized():
            return
        try:
            _check_port(address)
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
        except (OSError, RayError, RuntimeError, ValueError) as error:
            raise StoreUnavailable(f"no Ray can be reached at {address!r}: {error}") from None


def _check_port(address: str) -> None:
    """Raises OSError if nothing listens there: Ray would wait for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        socket.create_connection((host, int(port)), PORT_S).close()


class RayStore(BlockStore):
    """``address``: of a running Ray; "auto": that of this host. ``memory_bytes``: limit for the blocks of each
    host. ``fetch_s``: longest wait for a read. Raises ConfigError."""

    whole = True

    def __init__(
        self, context: StoreContext, *, address: str = "auto", memory_bytes: int = 1 << 30, fetch_s: float = 30.0
    ) -> None:
        self.fetch_s = fetch_s
        self._address, self._memory_bytes = address, memory_bytes
        self._owners: dict[str, Any] = {}
        self._closed = False
        if context.session == 0:  # the server; clients may come while Ray is away
            try:
                connect(address)
            except StoreUnavailable as error:
                raise ConfigError(f"{error}; start one: ray start --head") from None

    def write(self, address: str, name: str, block: Any) -> None:
        if not self._call(address, "put", name, block):
            raise MemoryFull(f"the blocks of this host have no room for {block.nbytes} bytes more")

    def read(self, address: str, reads: Sequence[BlockRead]) -> None:
        found = self._call(address, "find", [each.name for each in reads])
        for each, refs in zip(reads, found, strict=True):
            if not refs:
                raise LeaseLost(f"the block {each.name} is not in Ray")
        for each, block in zip(reads, _get([refs[0] for refs in found], self.fetch_s), strict=True):
            for start, stop in each.ranges:
                each.into[start:stop] = block[start:stop]

    def free(self, address: str, names: Sequence[str]) -> None:
        self._call(address, "free", list(names))

    def is_lost(self, address: str, identity: str) -> bool:
        try:
            return not self._call(address, "holds", identity)
        except OwnerDied:
            return True

    def open_memory(self, run: str, name: str, host: str) -> BlockMemory:
        connect(self._address)
        return RayMemory(run, f"{run}-{name}", self._memory_bytes)

    def close(self) -> None:
        self._closed = True
        self._owners.clear()

    def _call(self, address: str, method: str, *args: Any) -> Any:
        if self._closed:
            raise LeaseLost("the connection of these blocks is closed")
        connect(self._address)
        owner = self._owners.get(address)
        if owner is None:
            try:
                owner = self._owners[address] = ray.get_actor(address.split()[0], NAMESPACE)
            except ValueError:
                raise OwnerDied(f"the owner of these blocks, actor {address}, does not exist") from None
        try:
            return _get(getattr(owner, method).remote(*args), min(CALL_S, self.fetch_s))
        except StoreUnavailable:
            self._owners.pop(address, None)
            raise


class RayMemory(BlockMemory):
    """The owner of this node's blocks, which outlives this process. ``actor``: its name."""

    def __init__(self, run: str, actor: str, memory_bytes: int) -> None:
        self._run, self._actor, self._memory_bytes = run, actor, memory_bytes
        self._owner: Any = None
        self._identity = ""

    def check(self) -> str:
        if self._owner is None:
            self._owner = self._find_or_start()
        try:
            self._identity = _get(self._owner.identity.remote(), CALL_S)
        except OwnerDied:
            self._owner = self._find_or_start()
            self._identity = _get(self._owner.identity.remote(), CALL_S)
        self.address = f"{self._actor} {self._identity}"
        return self._identity

    def free_all(self, prefixes: Sequence[str]) -> None:
        _get(self._owner.free_all.remote(list(prefixes)), CALL_S)

    def close(self, *, keep: bool) -> None:
        owner, self._owner = self._owner, None
        if owner is not None and not keep and ray.is_initialized():
            with contextlib.suppress(RayError, ValueError):
                ray.kill(owner)

    def _find_or_start(self) -> Any:
        node = ray.get_runtime_context().get_node_id()
        try:
            return (
                ray.remote(BlockOwner)
                .options(
                    name=self._actor, namespace=NAMESPACE, lifetime="detached", get_if_exists=True, num_cpus=0,
                    max_restarts=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                )
                .remote(f"{self._run}-{secrets.token_hex(8)}", self._memory_bytes)
            )  # fmt: skip
        except (RayError, ValueError) as error:
            raise StoreUnavailable(f"Ray starts no owner of blocks on this node: {error}") from None


class OwnerDied(StoreUnavailable):
    """Raised when the actor that owns blocks is dead: they are lost."""


def _get(refs: Any, timeout_s: float) -> Any:
    """Raises StoreUnavailable, OwnerDied."""
    try:
        return ray.get(refs, timeout=timeout_s)
    except ActorDiedError as error:
        raise OwnerDied(f"the owner of these blocks died: {error}") from None
    except GetTimeoutError:
        raise StoreUnavailable(f"Ray gave no answer in {timeout_s:g} s") from None
    except RayError as error:
        raise StoreUnavailable(f"Ray failed: {error}") from None
