"""A session that sends whatever it is told to: commands that no queue would send, and bytes that are none."""

from typing import Any

from asyncflow_sdk import __version__
from asyncflow_sdk.queue.protocol import Block, Call, ClientHello, decode_result, encode
from asyncflow_sdk.wire import Client


class RawClient:
    """``sdk``: the version that its hello names; None: it says none."""

    def __init__(
        self, address: str, name: str = "raw", *, sdk: str | None = __version__, insecure: bool = False
    ) -> None:
        self._client = Client(address, insecure=insecure)
        if sdk is not None:
            self.send(ClientHello(name, 0, "", sdk))

    def send(
        self, command: Any, segment: str | None = None, *place: Any, events: tuple[Any, ...] = (), **more: Any
    ) -> Any:
        """The reply to a command, of which the payload lies in ``segment``, at ``place``: start, serial, rows, bytes, columns.
        Raises what the server reports."""
        block = None if segment is None else Block(segment, *place)
        return self.send_bytes(encode(Call(command, block, events, **more)))

    def send_bytes(self, body: bytes, payload: Any = ()) -> Any:
        """The reply to a call as it lies on the wire. ``payload``: what comes beside it."""
        answer = decode_result(self._client.exchange(body, 5, payload).body)
        answer.raise_error()
        return answer.reply

    def send_inline(self, command: Any, rows: int, image: bytes) -> Any:
        """The same for payload that comes beside its command: ``rows`` rows as an ``image`` of a block."""
        return self.send_bytes(encode(Call(command, payload=rows, inline=True)), [image])

    def close(self) -> None:
        self._client.close()
