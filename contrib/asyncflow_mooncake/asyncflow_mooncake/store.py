"""MooncakeStore: one hard-pinned object for each block, in the segment of a host's storage unit.

A unit writes a marker beside its blocks. A master that was restarted has forgotten both, so a missing
marker means that all blocks of the home are lost.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncflow_blocks import BlockMemory, BlockPayloadStore, BlockRead, BlockStore
from asyncflow_sdk.errors import ConfigError, LeaseLost, MemoryFull, StoreUnavailable
from asyncflow_sdk.interfaces import StoreContext

os.environ.setdefault("MC_LOG_LEVEL", "ERROR")

MISSING, NO_ROOM = -704, -200
PORT_S = 2.0
PATTERN_PREFIXES = 64
"""Prefixes in one pattern for the master."""
MARKER_BYTES = 64


def mooncake_store(context: StoreContext, **options: Any) -> BlockPayloadStore:
    """Return the store of a connection. ``options``: of ``MooncakeStore``."""
    return BlockPayloadStore("mooncake", MooncakeStore(context, **options), context)


class Cluster:
    """A Mooncake cluster. ``master``: "host:port" of its mooncake_master. ``protocol``, ``device``: of the
    transfer engine. ``buffer_bytes``: of the transfer engine, for each process."""

    def __init__(self, master: str, protocol: str, device: str, buffer_bytes: int) -> None:
        host, _, port = master.rpartition(":")
        if not host or not port.isdecimal():
            raise ConfigError(f"master={master!r}: give the address of a mooncake_master as 'host:port'")
        self.master, self._port = master, (host, int(port))
        self._protocol, self._device, self._buffer_bytes = protocol, device, buffer_bytes

    def check(self) -> None:
        """Raises StoreUnavailable if nothing listens at the master's port."""
        try:
            socket.create_connection(self._port, PORT_S).close()
        except OSError as error:
            raise StoreUnavailable(f"no mooncake_master answers at {self.master}: {error}") from None

    def connect(self, host: str, segment_bytes: int = 0) -> Any:
        """Return a client of Mooncake, with a segment of its own if it has bytes. Raises StoreUnavailable,
        ConfigError."""
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise ConfigError(
                f"Mooncake cannot be imported: {error}; it needs libibverbs1, librdmacm1 and libnuma1"
            ) from None
        self.check()  # setup does not return without a master
        client = MooncakeDistributedStore()
        code = client.setup(
            host, "P2PHANDSHAKE", segment_bytes, self._buffer_bytes, self._protocol, self._device, self.master
        )
        if code:
            raise StoreUnavailable(f"Mooncake's setup at {host} with the master {self.master} failed: {code}")
        return client


class MooncakeStore(BlockStore):
    """``segment_bytes``: memory of each host, of its storage unit. ``fetch_s``: longest wait for a read.
    ``protocol``: "tcp", or "rdma" with the ``device`` of each host. Raises ConfigError."""

    def __init__(
        self,
        context: StoreContext,
        *,
        master: str,
        segment_bytes: int = 1 << 30,
        buffer_bytes: int = 16 << 20,
        protocol: str = "tcp",
        device: str = "",
        fetch_s: float = 30.0,
    ) -> None:
        self.fetch_s = fetch_s
        self._cluster = Cluster(master, protocol, device, buffer_bytes)
        self._host, self._segment_bytes = context.host, segment_bytes
        self._lock = threading.Lock()
        self._made: Any = None
        self._closed = False
        if context.session == 0:  # the server; clients may come while the master is away
            try:
                self._cluster.check()
            except StoreUnavailable as error:
                raise ConfigError(
                    f"{error}; start one: mooncake_master --rpc_port={master.rpartition(':')[2]}"
                ) from None

    def write(self, address: str, name: str, block: Any) -> None:
        segment, endpoint = address.split()
        client = self._client()
        code = client.put_from(name, block.ctypes.data, block.nbytes, _pinned(segment))
        if code == NO_ROOM:
            raise MemoryFull(f"Mooncake has no room for {block.nbytes} bytes in the segment {segment}")
        if code:
            raise StoreUnavailable(f"Mooncake wrote no block: {code}")
        # a full segment does not refuse: the block goes to another host's, and would be lost with that
        if _endpoint(client, name) != endpoint:
            client.remove(name, True)
            raise MemoryFull(
                f"Mooncake has no room for {block.nbytes} bytes in the segment {segment}, only in others"
            )

    def read(self, address: str, reads: Sequence[BlockRead]) -> None:
        client = self._client()
        parts = list[BlockRead]()
        for each in reads:
            if list(each.ranges) != [(0, each.into.nbytes)]:
                parts.append(each)
                continue
            code = client.get_into(each.name, each.into.ctypes.data, each.into.nbytes)
            if code != each.into.nbytes:
                raise _unread(each.name, code)
        if parts:
            self._read_ranges(client, parts)

    def free(self, address: str, names: Sequence[str]) -> None:
        codes = self._client().batch_remove(list(names), True)  # forced: a read leases an object for 10 s
        if any(code not in (0, MISSING) for code in codes):
            raise StoreUnavailable(f"Mooncake removed no block: {min(codes)}")

    def is_lost(self, address: str, identity: str) -> bool:
        return not _exists(self._client(), f"{identity}/marker")

    def open_memory(self, run: str, name: str, host: str) -> BlockMemory:
        client = self._cluster.connect(host, self._segment_bytes)
        return MooncakeMemory(client, run)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._made = None  # closed with the last call of another thread, and never during it

    def _client(self) -> Any:
        with self._lock:
            if self._closed:
                raise LeaseLost("the connection of these blocks is closed")
            if self._made is None:
                self._made = self._cluster.connect(self._host)
            return self._made

    def _read_ranges(self, client: Any, reads: Sequence[BlockRead]) -> None:
        arrays = [each.into for each in reads]
        held = []
        try:
            for array in arrays:
                if client.register_buffer(array.ctypes.data, array.nbytes):
                    raise StoreUnavailable("Mooncake cannot register a buffer to read into")
                held.append(array)
            starts = [[[start for start, _ in each.ranges]] for each in reads]
            sizes = [[[stop - start for start, stop in each.ranges]] for each in reads]
            found = client.get_into_ranges(
                [array.ctypes.data for array in arrays], [[each.name] for each in reads], starts, starts, sizes
            )
        finally:
            for array in held:
                client.unregister_buffer(array.ctypes.data)
        for each, (codes,), (wanted,) in zip(reads, found, sizes, strict=True):
            if list(codes) != wanted:
                raise _unread(each.name, min(codes))


class MooncakeMemory(BlockMemory):
    """The segment of this process, which ends with it. ``run``: part of the identity, for people."""

    def __init__(self, client: Any, run: str) -> None:
        self._client, self._run = client, run
        self._identity = ""

    def check(self) -> str:
        if not self._identity or not _exists(self._client, f"{self._identity}/marker"):
            self._identity = self._mark()
        return self._identity

    def free_all(self, prefixes: Sequence[str]) -> None:
        for at in range(0, len(prefixes), PATTERN_PREFIXES):
            some = "|".join(map(_escaped, prefixes[at : at + PATTERN_PREFIXES]))
            code = self._client.remove_by_regex(f"^({some})", True)
            if code < 0:
                raise StoreUnavailable(f"Mooncake removed no blocks: {code}")

    def close(self, *, keep: bool) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _mark(self) -> str:
        identity = f"{self._run}-{secrets.token_hex(8)}"
        segment, name = self._client.get_hostname(), f"{identity}/marker"
        marker = np.zeros(MARKER_BYTES, np.uint8)
        code = self._client.put_from(name, marker.ctypes.data, marker.nbytes, _pinned(segment))
        if code:
            raise StoreUnavailable(f"Mooncake wrote no marker to the segment {segment}: {code}")
        self.address = f"{segment} {_endpoint(self._client, name)}"
        return identity


def _escaped(text: str) -> str:
    """Return a pattern of the master, in C++, for this very text."""
    return re.sub(r"[^A-Za-z0-9/!_-]", lambda found: "\\" + found[0], text)


def _pinned(segment: str) -> Any:
    """Return the settings of a write: without a hard pin, a full cluster silently evicts objects."""
    from mooncake.store import ReplicateConfig

    config = ReplicateConfig()
    config.replica_num = 1
    config.with_hard_pin = True
    config.preferred_segment = segment
    return config


def _endpoint(client: Any, name: str) -> str:
    found = client.get_replica_desc(name)
    if not found:
        raise StoreUnavailable(f"Mooncake does not say where it wrote {name}")
    endpoint: str = found[0].get_memory_descriptor().buffer_descriptor.transport_endpoint
    return endpoint


def _exists(client: Any, name: str) -> bool:
    code = client.is_exist(name)
    if code not in (0, 1):
        raise StoreUnavailable(f"Mooncake's master does not answer: {code}")
    return bool(code)


def _unread(name: str, code: int) -> LeaseLost | StoreUnavailable:
    if code == MISSING:
        return LeaseLost(f"the block {name} is not in Mooncake")
    return StoreUnavailable(f"Mooncake did not read the block {name}: {code}")
