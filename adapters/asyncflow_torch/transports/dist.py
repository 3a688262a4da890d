"""Weights by broadcast of torch.distributed: one publisher sends to many receivers at once, in a
process group of its own.

    publisher = run.weight_publisher("dist")                                 # gloo, on one host
    publisher = run.weight_publisher("dist", backend="nccl", insecure=True)  # several hosts, on a network of one's own

Versions are staged in host memory. A round broadcasts one version, bucket by bucket, into the
receivers' host memory, where each bucket is verified on arrival. Neither end holds more than the
version itself. ``nccl`` moves buckets through device memory; it is written after torch's
documentation and has not been run on a GPU.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Iterator, Sequence

from asyncflow_sdk.errors import (
    ConfigError,
    VersionGone,
)
from asyncflow_sdk.interfaces import Host, Room, WeightSender, WeightTransport
from asyncflow_sdk.types import Manifest
from asyncflow_sdk.weights.transports import Service, VersionMemory

from .dist_group import BACKENDS, missing
from .dist_messages import DistAddress, encode
from .dist_receiver import DistReceiver
from .dist_rounds import RoundServer


class DistTransport(WeightTransport):
    """Both ends, named ``dist``.

    ``backend``: "gloo" or "nccl". The sockets of a broadcast belong to torch and have no keys, not
    even on loopback; the calls that arrange a broadcast have keys. ``insecure``: allow broadcasts
    beyond loopback, readable by everyone on the network. ``stall_s``: a member that delays the
    others for longer is excluded. ``gather_s``: wait this long for receivers that probably request
    the same version.
    """

    def __init__(
        self, backend: str = "gloo", *, insecure: bool = False, stall_s: float = 20.0, gather_s: float = 0.2
    ) -> None:
        if backend not in BACKENDS:
            raise ConfigError(f"dist has no backend {backend!r}; it has {' and '.join(BACKENDS)}")
        if not (0 < stall_s <= 3600 and 0 <= gather_s < math.inf):
            raise ConfigError(f"stall_s={stall_s}, gather_s={gather_s}: seconds are expected, up to an hour")
        self._options = backend, insecure, float(stall_s), float(gather_s)

    def check(self) -> None:
        works(self._options[0])

    def sender(self, host: Host) -> DistSender:
        backend, insecure, stall_s, gather_s = self._options
        fits(backend, insecure, host.address)
        return DistSender(host, backend, insecure, stall_s=stall_s, gather_s=gather_s)

    def receiver(self, host: Host) -> DistReceiver:
        if why := missing("gloo"):
            raise ConfigError(f"dist: {why}; use the transport tcp")
        return DistReceiver(host, fits)


class DistSender(WeightSender):
    """Stages versions, and serves rounds in a thread of its own."""

    def __init__(self, host: Host, backend: str, insecure: bool, *, stall_s: float, gather_s: float) -> None:
        self._staging = VersionMemory.private(host.name)
        self._manifests: dict[int, Manifest] = {}
        self._rounds = RoundServer(
            host.name, host.address, backend, self._manifest, self._staging.chunks, stall_s=stall_s, gather_s=gather_s
        )
        try:
            self._service = Service(host.address, self._rounds, member=host.member)
        except BaseException:
            self._staging.close()
            raise
        self._rounds.start(self._service)
        self._where = encode(DistAddress(self._service.where, backend, insecure, stall_s, host.name, host.rank))

    @property
    def nbytes(self) -> int:
        return self._staging.nbytes

    def room(self, nbytes: int) -> Room:
        return self._staging.room(nbytes)

    def prepare(self, sizes: Sequence[int]) -> Iterator[None]:
        return self._staging.prepare(sizes)

    def send(self, manifest: Manifest) -> bytes:
        self._staging.seal(manifest.version)
        self._manifests[manifest.version] = manifest
        return self._where

    def abandon(self) -> None:
        self._staging.abandon()

    def keep(self, versions: Sequence[int]) -> None:
        self._staging.keep(versions)
        for version in self._manifests.keys() - set(versions):
            del self._manifests[version]

    def close(self) -> None:
        self._rounds.close()
        self._service.close()
        self._staging.close()

    def _manifest(self, version: int) -> Manifest:
        manifest = self._manifests.get(version)
        if manifest is None:
            raise VersionGone(f"version {version} is no longer kept; take the newest")
        return manifest


def works(backend: str) -> None:
    """Raise ConfigError if this torch or this machine does not support a backend."""
    if backend not in BACKENDS:
        raise ConfigError(f"dist has no backend {backend!r}; it has {' and '.join(BACKENDS)}")
    if why := missing(backend):
        raise ConfigError(f"dist with {backend}: {why}; use backend='gloo', or the transport tcp")


def fits(backend: str, insecure: bool, address: str) -> None:
    """Raise ConfigError if this process cannot take part in rounds of a publisher at ``address``."""
    works(backend)
    if not insecure and not _on_loopback(address):
        raise ConfigError(
            f"dist at {address}: what torch.distributed sends is not encrypted and anybody may connect; say"
            " insecure=True if everyone on that network may read the weights, or use the transport tcp, which has"
            " keys"
        )


def _on_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
