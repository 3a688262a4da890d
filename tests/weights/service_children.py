"""The ends of a weight service in processes of their own."""

import threading
from typing import Any

import numpy as np
from children import hear, say

from asyncflow_sdk.errors import AsyncFlowError
from asyncflow_sdk.interfaces.weights import Host
from asyncflow_sdk.weights.service import Service, ServiceClient


class Shelf:
    """Answers ``get`` with bytes of its own, parks ``wait`` until it is told, fails at ``bad``."""

    def __init__(self, nbytes: int = 1 << 20) -> None:
        self.bytes = np.arange(nbytes, dtype=np.uint8)
        self.parked: list[int] = []
        self.asked: list[bytes] = []
        self.gone_ones: list[str] = []
        self.came = threading.Condition()
        self.service: Service

    def request(self, peer: str, ticket: int, body: bytes, frames: Any) -> None:
        with self.came:
            self.asked.append(body)
            self.came.notify_all()
        if body == b"get":
            self.service.answer(ticket, b"here", [self.bytes, self.bytes[:100]])
        elif body == b"wait":
            self.parked.append(ticket)
        elif body == b"bad":
            raise KeyError("what")
        else:
            self.service.answer(ticket, body + b"".join(bytes(frame) for frame in frames))

    def gone(self, peer: str) -> None:
        with self.came:
            self.gone_ones.append(peer)
            self.came.notify_all()

    def until(self, condition: Any) -> None:
        with self.came:
            assert self.came.wait_for(condition, 30)


def serve(address: str, insecure: bool) -> None:
    shelf = Shelf()
    shelf.service = Service(Host(directory=None, name="here", address=address), shelf, insecure=insecure)
    say(shelf.service.where.hex())
    hear()


def ask(where: str, what: str, timeout_s: float) -> None:
    client = ServiceClient(bytes.fromhex(where))
    say("ready")
    hear()
    try:
        answered = client.call(what.encode(), timeout_s, "a test")
        say([answered.body.decode(), [len(memoryview(frame)) for frame in answered.frames]])
    except AsyncFlowError as error:
        say([type(error).__name__, str(error)])
    hear()
