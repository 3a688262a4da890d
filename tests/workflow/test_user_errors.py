"""Errors of functions that users wrote: the cause first, once, then their frames and none of the SDK's."""

import logging
import re
from pathlib import Path
from typing import Any

import functions
import pytest
from echo_runs import echo_workflow
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError

SDK = Path(af.__file__).parent


def check_frames(text: str, first: str, last: str = "looks_up") -> None:
    """A traceback that is there once, from the user's function to where it raised."""
    frames = re.findall(r'File "(.*)", line \d+, in (\S+)', text)
    assert [name for _, name in (frames[0], frames[-1])] == [first, last], text
    assert not [file for file, _ in frames if Path(file).is_relative_to(SDK)], text
    assert text.count("Traceback (most recent call last)") == 1, text
    assert "KeyError: 'no such answer'" in text.splitlines()[0], "the cause comes first"
    assert text.count("KeyError: 'no such answer'") == 1, text


def last_example(error: ConfigError) -> str:
    """The last reason in the error of too many failures."""
    return re.split(r"row \d+ in task ", str(error))[-1]


async def raises_awaited(response_ids: Any) -> Any:
    return functions.raises_below(response_ids)


async def agent_that_raises(turns: Any) -> None:
    await turns.generate()
    functions.looks_up({}, "no such answer")


@pytest.mark.parametrize(
    ("function", "first", "place"),
    [
        (functions.raises_below, "raises_below", {}),
        (raises_awaited, "raises_awaited", {"launcher": "thread"}),
        (lambda response_ids: functions.raises_below(response_ids), "<lambda>", {}),
    ],
)
def test_a_stages_error_shows_its_frames_first_and_once(
    tmp_path: Path, function: Any, first: str, place: dict[str, Any]
) -> None:
    stage = af.Stage(function, task="reward", gives=["reward"], **place)
    with pytest.raises(ConfigError) as failed:
        echo_workflow(reward=stage, max_failed=0).run(tmp_path / "run")

    check_frames(last_example(failed.value), first)


def test_an_agents_error_shows_its_frames_first_and_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as failed:
        echo_workflow(rollout={"agent": agent_that_raises}).run(tmp_path / "run")

    check_frames(last_example(failed.value), "agent_that_raises")


def test_an_on_steps_error_shows_its_frames_first_and_once(caplog: pytest.LogCaptureFixture) -> None:
    def on_step(step: int, read: Any) -> None:
        functions.looks_up({}, "no such answer")

    with caplog.at_level(logging.ERROR), af.serve(on_step=on_step) as run:
        run.queue.declare("train", needs=["x"], batch_rows=1)
        run.queue.put({"x": [1]})
        run.queue.get("train", timeout_s=60).ack()
        until(lambda: "on_step" in caplog.text, "the listener's failure")

    check_frames(caplog.text, "on_step")
