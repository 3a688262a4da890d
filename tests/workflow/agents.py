"""Agents that worker processes can import. The echo engine answers with what it was asked."""

import asyncio

import numpy as np


async def two_turns(turns, length):
    """Two turns, and what an environment says between and after them."""
    first = await turns.generate(max_tokens=2)
    second = await turns.generate([90, 91, *first.token_ids.tolist()])
    turns.observe([99])
    return {"reward": float(length + len(second.token_ids)), "said": second.token_ids}


async def slow_tool(turns):
    """Three turns with something slow between them."""
    for _ in range(3):
        await turns.generate()
        await asyncio.sleep(0.005)
        turns.observe([7])
    return 1.0


async def fails_at_five(turns, prompt_ids):
    """Raises for the prompt that begins with 5."""
    await turns.generate()
    if prompt_ids[0] == 5:
        raise LookupError("no such tool")
    return 1.0


async def says_no_text(turns, prompt_ids):
    await turns.generate()
    if prompt_ids[0] == 5:
        raise ValueError("\ud800" + "x" * 20_000)
    return 1.0


async def never_ends(turns, prompt_ids):
    await turns.generate()
    if prompt_ids[0] == 5:
        await asyncio.Event().wait()
    return 1.0


async def talks_on(turns):
    """Until the context is full, whatever else it is told."""
    count = 0
    while not turns.over:
        turn = await turns.generate()
        turns.observe(np.arange(1, 500))
        count += 1
    assert (await turns.generate()).finish_reason == "length"
    return {"reward": 1.0, "turns": count, "last": turn.finish_reason}


async def silent(turns):
    turns.observe([1, 2])
    return 1.0
