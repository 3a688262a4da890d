"""Answers that come in parts, as server-sent events, over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from asyncflow_sdk.errors import EngineError

pytest.importorskip("aiohttp")
from asyncflow_http.client import HttpClient, RequestRefused


class Part(msgspec.Struct):
    ids: list[int]


async def asked(
    pieces: Sequence[bytes], status: str = "200 OK", most_bytes: int = 1 << 16
) -> tuple[list[list[int]], Any]:
    """The parts of an answer that is sent in ``pieces``, each once the one before has been read; and the answer."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Type: text/event-stream\r\n\r\n".encode())
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    client, parts = HttpClient(f"http://{host}:{port}", "", "the server"), list[list[int]]()
    try:
        last = await client.post("/", {}, Part, most_bytes=most_bytes, part=lambda part: parts.append(part.ids))
        return parts, last
    finally:
        await client.close()
        server.close()


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_parts_come_one_by_one_however_their_bytes_are_cut(size: int) -> None:
    said = b"".join(b'data: {"ids": [%d]}\n\n' % number for number in range(3)) + b"data: [DONE]\n\n"

    parts, last = asyncio.run(asked([said[at : at + size] for at in range(0, len(said), size)]))

    assert (parts, last.ids) == ([[0], [1], [2]], [2])


@pytest.mark.parametrize(
    ("said", "status", "error", "reason"),
    [
        (b'data: {"error": {"message": "no such token"}}\n\n', "200 OK", EngineError, "no such token"),
        (b'data: {"ids": [' + b"1," * 40_000, "200 OK", EngineError, "more than 65536 bytes"),
        (b'{"error": {"message": "busy"}}\n\n', "503 Busy", RequestRefused, "status 503: busy"),
        (b"data: [DONE]\n\n", "200 OK", EngineError, "cannot be read"),
    ],
)
def test_what_is_no_part_is_an_error_with_the_reason(said: bytes, status: str, error: Any, reason: str) -> None:
    with pytest.raises(error, match=reason):
        asyncio.run(asked([said], status))
