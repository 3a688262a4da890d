"""Aborts of requests to a server, over a real socket: it answers a request of ``HELD`` once it is aborted."""

from __future__ import annotations

import asyncio
import collections
from typing import Any

import pytest

pytest.importorskip("aiohttp")
from aiohttp import web

from asyncflow_http.server import HttpServer
from asyncflow_vllm.access import VllmAnswer
from asyncflow_vllm.http import GENERATE, HttpAccess

SHORT, HELD = [1], [2]


class AbortedAsItEnds(HttpAccess):
    """Aborts a short response when the server has answered and its caller does not know it yet."""

    async def answer(self, index: int, name: str, prompt: list[int], *rest: Any) -> VllmAnswer:
        answer = await super().answer(index, name, prompt, *rest)
        if prompt == SHORT:
            await self.abort_named([name])
        return answer


async def abort_two_requests(failing: int = 0) -> list[list[str]]:
    """Abort a response that ends, and then one that runs. Return the names in each call of the server, of which the
    first ``failing`` fail."""
    held: dict[str, asyncio.Event] = collections.defaultdict(asyncio.Event)
    asked, aborts = asyncio.Event(), list[list[str]]()

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        if body["token_ids"] == HELD:
            asked.set()
            await held[body["request_id"]].wait()
        return web.json_response({"choices": [{"token_ids": [], "finish_reason": "abort"}]})

    async def abort(request: web.Request) -> web.Response:
        names = [name.removeprefix("generate-tokens-") for name in (await request.json())["request_ids"]]
        aborts.append([name.partition("-")[2] for name in names])
        if len(aborts) <= failing:
            raise web.HTTPServiceUnavailable
        for name in names:
            held[name].set()
        return web.json_response({})

    app = web.Application()
    app.add_routes([web.post(GENERATE, generate), web.post("/abort_requests", abort)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    access = AbortedAsItEnds(
        HttpServer.running(f"http://{host}:{port}", None, "vLLM", health="/health"), request_s=100.0, update_s=100.0
    )

    async def ask(name: str, prompt: list[int]) -> list[str]:
        return [each.reason async for got in access.answers(name, prompt, {"max_tokens": 1}, 1) for each in got]

    try:
        assert await ask("short", SHORT) == ["abort"]
        running = asyncio.create_task(ask("held", HELD))
        await asked.wait()
        await access.abort(["held"])
        assert await running == ["abort"]
    finally:
        await access.close()
        await runner.cleanup()
    return aborts


def test_a_response_that_ends_as_it_is_aborted_delays_no_later_abort() -> None:
    aborts = asyncio.run(abort_two_requests())
    assert {tuple(names) for names in aborts if "held-0" in names} == {("held-0",)}


def test_an_abort_that_fails_is_repeated() -> None:
    aborts = asyncio.run(abort_two_requests(failing=3))
    assert len(aborts) >= 4
