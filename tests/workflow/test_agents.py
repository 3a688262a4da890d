"""Conversations: what of them becomes a row, what happens to those that fail, and how they meet new weights."""

import asyncio
import math
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from echo_runs import echo_workflow, trained_rows

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, EngineError
from asyncflow_sdk.testing import EchoRollout
from asyncflow_sdk.types.events import Event, Loaded
from asyncflow_sdk.workflow.loops import agent as agents
from asyncflow_sdk.workflow.loops.user_code import ServiceAway

LIMIT_S = 60

# ---- agents; the echo engine answers with what it was asked


async def two_turns(turns: Any, length: Any) -> Any:
    """Two turns, and what an environment says between and after them."""
    first = await turns.generate(max_tokens=2)
    second = await turns.generate([90, 91, *first.token_ids.tolist()])
    turns.observe([99])
    return {"reward": float(length + len(second.token_ids)), "said": second.token_ids}


class Tool:
    """Something slow between turns. ``waits``: its first use ends once new weights were loaded."""

    waits, loaded = False, False
    never = threading.Event()

    @classmethod
    async def use(cls) -> None:
        waits, cls.waits = cls.waits, False
        while waits and not cls.loaded:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.005)


def plain_two_turns(turns: Any, length: Any) -> Any:
    """The same as a plain function, in a thread."""
    assert threading.current_thread().name == "plain_two_turns"
    first = turns.generate(max_tokens=2)
    second = turns.generate([90, 91, *first.token_ids.tolist()])
    turns.observe([99])
    assert len(turns.response_ids) == 11
    return {"reward": float(length + len(second.token_ids)), "said": second.token_ids}


async def slow_tool(turns: Any) -> float:
    """Three turns with something slow between them."""
    for _ in range(3):
        await turns.generate()
        await Tool.use()
        turns.observe([7])
    return 1.0


async def fails_at_five(turns: Any, prompt_ids: Any) -> float:
    """Raises for the prompt that begins with 5."""
    await turns.generate()
    if prompt_ids[0] == 5:
        raise LookupError("no such tool")
    return 1.0


async def says_no_text(turns: Any, prompt_ids: Any) -> float:
    await turns.generate()
    if prompt_ids[0] == 5:
        raise ValueError("\ud800" + "x" * 20_000)
    return 1.0


async def never_ends(turns: Any, prompt_ids: Any) -> float:
    await turns.generate()
    if prompt_ids[0] == 5:
        await asyncio.Event().wait()
    return 1.0


async def blocks(turns: Any, prompt_ids: Any) -> float:
    """Stops its event loop for the prompt that begins with 5."""
    await turns.generate()
    if prompt_ids[0] == 5:
        Tool.never.wait()
    return 1.0


def plain_blocks(turns: Any, prompt_ids: Any) -> float:
    turns.generate()
    if prompt_ids[0] == 5:
        Tool.never.wait()
    return 1.0


async def exits(turns: Any, prompt_ids: Any) -> float:
    await turns.generate()
    if prompt_ids[0] == 5:
        sys.exit(0)
    return 1.0


def plain_exits(turns: Any, prompt_ids: Any) -> float:
    turns.generate()
    if prompt_ids[0] == 5:
        next(iter(()))
    return 1.0


async def cancels(turns: Any, prompt_ids: Any) -> float:
    await turns.generate()
    if prompt_ids[0] == 5:
        raise asyncio.CancelledError
    return 1.0


async def gives_no_number(turns: Any, prompt_ids: Any) -> Any:
    await turns.generate()
    return math.nan if prompt_ids[0] == 5 else 1.0


async def gives_nothing(turns: Any, prompt_ids: Any) -> Any:
    await turns.generate()
    return None if prompt_ids[0] == 5 else 1.0


async def gives_text(turns: Any, prompt_ids: Any) -> Any:
    await turns.generate()
    return "a" if prompt_ids[0] == 5 else 1.0


async def gives_other_columns(turns: Any, prompt_ids: Any) -> Any:
    await turns.generate()
    return {"rewards": 1.0} if prompt_ids[0] == 5 else 1.0


async def talks_on(turns: Any) -> Any:
    """Until the context is full, whatever else it is told."""
    count = 0
    while not turns.over:
        turn = await turns.generate()
        turns.observe(np.arange(1, 500))
        count += 1
    assert (await turns.generate()).finish_reason == "length"
    return {"reward": 1.0, "turns": count, "last": turn.finish_reason}


async def silent(turns: Any) -> float:
    turns.observe([1, 2])
    return 1.0


# ---- tests


@pytest.fixture
def run() -> Iterator[af.Run]:
    with af.serve(max_staleness=4) as run:
        yield run


def answered(run: af.Run, agent: af.Agent, prompts: dict[str, Any], engine: Any = None, **options: Any) -> Any:
    """All rows that a producer with the agent makes of prompts, in the order of their ids."""
    gives = ["response_ids", "logprobs", "version_spans", "finish_reason", "loss_mask", *agent.gives]
    run.queue.declare("rollout", needs=[*prompts], gives=gives)
    run.queue.declare("sink", needs=["prompt_ids", *gives])
    run.queue.put(prompts)
    run.queue.end()
    rows = list[dict[str, Any]]()

    def take() -> None:
        with af.connect(run.address, name="sink") as other:
            for batch in other.consumer("sink", timeout_s=LIMIT_S):
                of = {name: batch[name] for name in batch} | {"id": batch.ids.tolist()}
                rows.extend({name: column[row] for name, column in of.items()} for row in range(batch.rows))
                batch.complete()

    taking = threading.Thread(target=take)
    taking.start()
    try:
        producer = af.EngineProducer(run.queue, engine or EchoRollout(), agent=agent, **options)
        asyncio.run(asyncio.wait_for(producer.run(), LIMIT_S))
    except BaseException:
        run.queue.end(cancel=True)
        raise
    finally:
        taking.join()
    return sorted(rows, key=lambda row: row["id"])


@pytest.mark.parametrize("function", [two_turns, plain_two_turns])
def test_a_row_is_what_was_drawn_and_observed_token_by_token(run: af.Run, function: Any) -> None:
    # given an environment that speaks between two turns, and after them
    agent = af.Agent(function=function, gives=("reward", "said"))

    # when
    (row,) = answered(run, agent, {"prompt_ids": [[1, 2, 3]], "length": [5]}, sampling=af.Sampling(max_tokens=4))

    # then the second turn answered to all that came before it
    assert row["response_ids"].tolist() == [1, 2, 90, 91, 1, 2, 1, 2, 3, 1, 99]
    assert row["loss_mask"].tolist() == [True] * 2 + [False] * 4 + [True] * 4 + [False]
    assert row["loss_mask"].dtype == np.bool_
    assert row["version_spans"].tolist() == [[0, 0, 11]]
    assert row["logprobs"].tolist() == [0.0] * 11
    assert (row["reward"], row["said"].tolist()) == (9.0, [1, 2, 3, 1])


def test_a_turn_ends_at_a_stop_token(run: af.Run) -> None:
    async def stops(turns: af.Turns) -> float:
        turn = await turns.generate(stop=[2, 9])
        assert (turn.token_ids.tolist(), turn.finish_reason, turn.text) == ([1, 2], "stop", "")
        assert (await turns.generate(stop=[3])).token_ids.tolist() == [1, 2, 3]
        return 1.0

    (row,) = answered(run, af.Agent(function=stops, gives=("reward",)), {"prompt_ids": [[1, 2, 3]]})
    assert row["response_ids"].tolist() == [1, 2, 1, 2, 3]


def test_a_conversation_ends_where_the_context_does(run: af.Run) -> None:
    agent = af.Agent(function=talks_on, gives=("reward", "turns", "last"))
    (row,) = answered(run, agent, {"prompt_ids": [[1] * 3]}, sampling=af.Sampling(max_tokens=50))
    assert 3 + len(row["response_ids"]) == 4096
    assert (row["turns"], row["finish_reason"]) == (8, "length")
    assert not row["loss_mask"][-1]


@pytest.mark.parametrize(
    ("agent", "timeout_s", "why"),
    [
        (
            "fails_at_five",
            600,
            ["agent fails_at_five() raised LookupError: no such tool", "line", "raise LookupError"],
        ),
        ("says_no_text", 600, ["agent says_no_text() raised ValueError: \\ud800xxx", "xxx ... xxx"]),
        ("never_ends", 0.3, ["agent never_ends() did not end in 0.3 s"]),
        ("blocks", 0.3, ["agent blocks() did not end in 0.3 s: it blocks its event loop at", "test_agents.py:"]),
        ("plain_blocks", 0.3, ["agent plain_blocks() did not end in 0.3 s: it is at", "test_agents.py:"]),
        ("exits", 600, ["agent exits() raised RuntimeError: SystemExit: 0", "sys.exit(0)"]),
        ("plain_exits", 600, ["agent plain_exits() raised RuntimeError: StopIteration", "next(iter(()))"]),
        ("cancels", 600, ["agent cancels() raised RuntimeError: CancelledError"]),
        ("silent", 600, ["agent silent(): its model never said anything"]),
        ("gives_no_number", 600, ["the reward nan; that is one finite number"]),
        ("gives_nothing", 600, ["the reward None; that is one finite number"]),
        ("gives_text", 600, ["the reward 'a'"]),
        ("gives_other_columns", 600, ["returned columns ['rewards'], and gives ['reward']"]),
    ],
)
def test_an_agent_that_fails_costs_its_own_row_only(
    run: af.Run, agent: str, timeout_s: float, why: list[str]
) -> None:
    # given one prompt of which the agent makes nothing
    prompts = [[4, 4], [5, 5], [6, 6]] if agent != "silent" else [[5, 5]]

    # when
    work = af.Agent(function=globals()[agent], gives=("reward",), timeout_s=timeout_s)
    rows = answered(run, work, {"prompt_ids": prompts})

    # then the others are there, and it is told why this one is not, after as many attempts as a stage has
    assert [row["response_ids"].tolist() for row in rows] == [ids for ids in prompts if ids[0] != 5]
    (letter,) = run.queue.failed()
    assert all(part in letter.reasons[-1] for part in why)
    assert len(letter.reasons) == 3


class Spoken:
    """A conversation with one turn."""

    failure = None

    def close(self) -> None:
        """Do nothing."""

    def row(self, columns: Any) -> Any:
        return columns


def rewards_of(agent: af.Agent, notes: list[str], rows: int = 1) -> list[Any]:
    """What conversations at the same time give, or raise."""

    async def converse() -> list[Any]:
        runner = agents.AgentRunner(agent, notes.append)
        each = [runner.converse(Spoken, {"number": number}, number) for number in range(rows)]
        try:
            return await asyncio.gather(*each, return_exceptions=True)
        finally:
            await runner.close()

    return asyncio.run(converse())


def test_code_that_blocks_the_event_loop_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # given
    notes, freed = list[str](), threading.Event()

    async def slow(turns: Any, number: int) -> float:
        assert freed.wait(60)  # as a request of a blocking client
        return 1.0

    class Notes(list[str]):
        def append(self, text: str) -> None:
            super().append(text)
            freed.set()

    monkeypatch.setattr(agents, "BLOCKED_S", 0.2)
    notes = Notes()
    # when
    rewards = rewards_of(af.Agent(function=slow, gives=("reward",)), notes)
    # then
    assert rewards == [{"reward": 1.0}]
    line = slow.__code__.co_firstlineno + 1
    assert f"has blocked its event loop for 0.2 s, at {__file__}:{line}, in slow()" in notes[0]


@pytest.mark.parametrize("plain", [False, True])
def test_absent_service_is_waited_for_with_one_warning(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a service that is back after three attempts of each conversation, or never
    tries: list[int] = []
    limit = 3

    def ask(turns: Any, number: int) -> float:
        tries.append(number)
        if tries.count(number) <= limit:
            try:
                raise ConnectionRefusedError("nobody listens")
            except OSError as error:
                raise RuntimeError("no answer") from error
        return 1.0

    async def ask_softly(turns: Any, number: int) -> float:
        return ask(turns, number)

    agent, notes = af.Agent(function=ask if plain else ask_softly, gives=("reward",)), list[str]()
    # when
    rewards = rewards_of(agent, notes, 2)
    # then
    assert rewards == [{"reward": 1.0}] * 2
    assert len(notes) == 1
    # when
    limit = 10**6
    monkeypatch.setattr(agents, "SERVICE_S", 1.0)
    failed = rewards_of(replace(agent, timeout_s=1.0), notes, 2)
    # then
    assert ServiceAway in map(type, failed)
    assert "was away for 1 s: RuntimeError: no answer" in str(failed)


def test_what_the_engine_refuses_fails_the_row_even_if_the_agent_does_not_mind(run: af.Run) -> None:
    async def goes_on(turns: af.Turns) -> float:
        try:
            await turns.generate()
        except EngineError:
            return 1.0
        return 0.0

    class Refuses(EchoRollout):
        async def generate(self, request: af.Request) -> Any:
            raise EngineError("not today")
            yield

    answered(run, af.Agent(function=goes_on, gives=("reward",)), {"prompt_ids": [[5]]}, Refuses())
    (letter,) = run.queue.failed()
    assert "EngineError: not today" in letter.reasons[-1]


async def yields(turns: Any) -> Any:
    yield 1.0


async def _in_main(turns: Any) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"agent": lambda turns: 1.0}, "cannot be imported by its worker"),
        ({"agent": yields}, "an agent returns its columns; yields yields them"),
        ({"agent": two_turns, "agent_timeout_s": 0}, "agent_timeout_s must be above 0"),
        ({"gives": ["reward"]}, "needs= and gives= are an agent's"),
    ],
)
def test_what_is_no_agent_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        af.Rollout("echo", prompt="prompt_ids", **changes)


def test_an_agent_that_no_worker_can_import_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async def within(turns: Any) -> float:
        return 1.0

    monkeypatch.setattr(_in_main, "__module__", "__main__")
    with pytest.raises(ConfigError, match="within cannot be imported by its worker: it is defined within another"):
        af.Rollout("echo", prompt="prompt_ids", agent=within)
    with pytest.raises(ConfigError, match="it is in the script that was started.*a module of its own"):
        af.Rollout("echo", prompt="prompt_ids", agent=_in_main)


def test_a_workflow_trains_on_conversations_and_the_agents_reward(tmp_path: Path) -> None:
    rollout = af.Rollout(
        "echo", group_size=4, prompt="prompt_ids", replicas=2, delay_s=0.002, spread=1.0, agent=two_turns,
        gives=["reward", "said"], launcher="thread",
    )  # fmt: skip
    prompts = {"prompt_ids": af.Ragged.of([[1, 2, 3], [4], [5, 6]]), "length": np.array([3, 1, 2])}

    result = echo_workflow(prompts=prompts, rollout=rollout, reward=None).run(tmp_path / "run")

    assert len(trained_rows(result.directory)) == 3 * 16
    for _, batch in af.read_steps(tmp_path / "run"):
        masks, responses = batch.ragged("loss_mask"), batch.ragged("response_ids")
        assert (masks.lengths == responses.lengths).all()
        assert not batch.ragged("logprobs").values[~masks.values].any()
        for row in range(batch.rows):
            assert responses[row][-1] == 99
    drawn = sum(int(batch.ragged("loss_mask").values.sum()) for _, batch in af.read_steps(tmp_path / "run"))
    assert len(af.staleness_of(tmp_path / "run").values) == drawn


@pytest.mark.parametrize("swap", ["drain", "boundary", "partial", "in_flight"])
def test_conversations_meet_new_weights_as_the_policy_says(
    tmp_path: Path, swap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tool, "waits", swap != "drain")  # which waits for whole conversations
    monkeypatch.setattr(Tool, "loaded", False)

    def listen(event: Event) -> None:
        if isinstance(event, Loaded) and event.version > 0:
            Tool.loaded = True

    drawing: dict[str, Any] = (
        {"token_s": 0.002, swap: True} if swap in ("partial", "in_flight") else {"delay_s": 0.01}
    )
    rollout = af.Rollout(
        "echo",
        group_size=4,
        prompt="prompt_ids",
        max_rows=8,
        agent=slow_tool,
        gives=["reward"],
        launcher="thread",
        **drawing,
    )

    echo_workflow(
        rollout=rollout, reward=None, steps=6, weights=af.Weights(swap=swap), staleness=af.Staleness(max_staleness=2)
    ).run(tmp_path / "run", on_event=listen)

    several = 0  # the train engine has refused rows whose drawn tokens are of other versions than they say
    for step, batch in af.read_steps(tmp_path / "run"):
        spans = batch.ragged("version_spans")
        late = step - spans.values[:, 0]
        assert late.min() >= 0
        assert late.max() <= 2
        several += int((spans.lengths > 1).sum())
    assert bool(several) == (swap != "drain")
