"""HandshakeMonitor: detects by a socket's events if a new connection was accepted, or its key
refused.
"""

from __future__ import annotations

from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from ..errors import AccessDenied

_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_MAX_FAILURES = 3
"""Connections cut during the handshake in a row before access counts as denied: a peer that cannot
decrypt a message closes without a reason."""


class HandshakeMonitor:
    """Monitors one socket until a handshake succeeds. ``monitor``: readable when ``read`` has
    events. ``failures``: connections cut during the handshake, in a row. ``patient``: accept any
    number of them, because a server short of descriptors cuts connections too.
    """

    def __init__(self, socket: Any, address: str, keyed: bool, patient: bool = False) -> None:
        self._socket, self._address, self._keyed, self._patient = socket, address, keyed, patient
        self.failures = 0
        self.monitor = socket.get_monitor_socket(_EVENTS)

    def read(self) -> bool:
        """Process the events. Return True once a handshake succeeded. Raises AccessDenied."""
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.close()
                return True
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise AccessDenied(f"the server at {self._address} does not accept this key; ask for its run.key")
            self.failures += 1
            if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL or (self.failures >= _MAX_FAILURES and not self._patient):
                raise AccessDenied(self._why())
        return False

    def close(self) -> None:
        """Stop monitoring."""
        if not self._socket.closed:
            self._socket.disable_monitor()
        self.monitor.close(linger=0)

    def _why(self) -> str:
        if self._keyed:
            return (
                f"the server at {self._address} has no keys, or others than this key is for: is it the run.key of"
                " that run? If the run is served without keys, connect with insecure=True and without a key"
            )
        return (
            f"the server at {self._address} needs a key; pass key=, the path of a copy of the run's run.key, and not"
            " insecure=True"
        )
