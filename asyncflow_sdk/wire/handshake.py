"""HandshakeMonitor: what became of a new connection and its keys, by the socket's own events."""

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
_CUT = 3
"""Connections cut during the handshake, one after another, that are no accident: a peer that cannot read what it
is sent closes without a word."""


class HandshakeMonitor:
    """Watches one socket until a handshake succeeds. ``monitor`` is readable when there is news. ``cut``: connections that
    were cut before that, one after another. ``patient``: any number of them, as by a server that is short of descriptors.
    """

    def __init__(self, socket: Any, address: str, keyed: bool, patient: bool = False) -> None:
        self._socket, self._address, self._keyed, self._patient = socket, address, keyed, patient
        self.cut = 0
        self.monitor = socket.get_monitor_socket(_EVENTS)

    def read(self) -> bool:
        """Take in the news; True once a handshake succeeded. Raises AccessDenied when none will."""
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.close()
                return True
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise AccessDenied(f"the server at {self._address} does not let this key in; ask for its run.key")
            self.cut += 1
            if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL or (self.cut >= _CUT and not self._patient):
                raise AccessDenied(self._why())
        return False

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
        self.monitor.close(linger=0)

    def _why(self) -> str:
        if self._keyed:
            return (
                f"what listens at {self._address} has no keys, or others than this key is for: is it the run.key of"
                " that run? Connect with insecure=True to a run that is served so, and without a key"
            )
        return (
            f"what listens at {self._address} needs a key; pass key=, the path of a copy of the run's run.key, and not"
            " insecure=True"
        )
