"""Transport ``tcp``: from the publisher's host memory to replicas on any host.

    run.weight_publisher("tcp")                                               # with keys
    run.weight_publisher("tcp", listen="tcp://10.0.0.7:9000", insecure=True)  # without: trusted networks only

Replicas request several buckets at a time, and verify each on arrival. A replica with an earlier
version that the publisher still keeps gets deltas where they are smaller.

Replicas on other hosts share: one process of a host fetches a version into shared memory for all of
them.
"""

from __future__ import annotations

from typing import Any

from ...errors import ConfigError
from ...interfaces.weights import Host, WeightTransport
from ...types.validation import check_least
from .tcp_receiver import TcpReceiver
from .tcp_sender import TcpSender

DELTA_BYTES = 256 << 20


class TcpTransport(WeightTransport):
    """Both ends, by the name ``tcp``.

    ``listen``: the publisher's address; default: a free port of its host. ``insecure``: no keys, so
    everyone with access to the address may fetch the weights. ``delta_bytes``: the publisher's
    memory for deltas made for one replica and kept for others; 0: whole buckets only.
    """

    def __init__(self, *, listen: str | None = None, insecure: bool = False, delta_bytes: int = DELTA_BYTES) -> None:
        if listen is not None and not listen.startswith("tcp://"):
            raise ConfigError(f"transport 'tcp' cannot listen at {listen!r}; tcp://HOST:PORT is expected")
        check_least(0, delta_bytes=delta_bytes)
        self._options: dict[str, Any] = {"listen": listen, "insecure": insecure, "delta_bytes": delta_bytes}

    def sender(self, host: Host) -> TcpSender:
        """See ``WeightTransport.sender``."""
        return TcpSender(host, **self._options)

    def receiver(self, host: Host) -> TcpReceiver:
        """See ``WeightTransport.receiver``."""
        return TcpReceiver(host)
