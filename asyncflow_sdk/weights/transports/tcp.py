"""Weights over tcp: from the publisher's host memory to that of a replica on any host.

    run.weight_publisher("tcp")                                               # with keys
    run.weight_publisher("tcp", listen="tcp://10.0.0.7:9000", insecure=True)  # without, on a network of one's own

Replicas ask for buckets, several at a time, and verify each as it comes. One that has an earlier version which the
publisher still keeps gets what differs from it, where that is smaller; where it is not, it gets the next version while
that is written.
"""

from __future__ import annotations

from ...errors import ConfigError
from ...interfaces.weights import Host, WeightTransport
from ...types.validation import check_least
from .tcp_receiver import TcpReceiver
from .tcp_sender import TcpSender

DELTA_BYTES = 256 << 20


class TcpTransport(WeightTransport):
    """Both ends, by the name ``tcp``.

    ``listen``: an address for the publisher instead of any port of its host. ``insecure``: without keys;
    everyone who reaches the publisher's address may fetch the weights. ``delta_bytes``: the publisher's memory for deltas that may
    serve another replica; 0: whole buckets are sent, always.
    """

    def __init__(self, *, listen: str | None = None, insecure: bool = False, delta_bytes: int = DELTA_BYTES) -> None:
        if listen is not None and not listen.startswith("tcp://"):
            raise ConfigError(f"transport 'tcp' cannot listen at {listen!r}; tcp://HOST:PORT is expected")
        check_least(0, delta_bytes=delta_bytes)
        self._listen, self._insecure, self._delta_bytes = listen, insecure, delta_bytes

    def sender(self, host: Host) -> TcpSender:
        return TcpSender(host, listen=self._listen, insecure=self._insecure, delta_bytes=self._delta_bytes)

    def receiver(self, host: Host) -> TcpReceiver:
        return TcpReceiver()
