"""Replicas that take new weights in every way there is, in threads and, where one is killed or sleeps, in processes: no row is lost, none is of a mixture."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from echo_runs import check_whole, echo_workflow, events_of
from gates import Gates, Listener

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, WorkerFailed
from asyncflow_sdk.testing import EchoTrain
from asyncflow_sdk.types.events import Committed, Event, Loaded, Span, WeightState, WorkerState

LONG = {"prompt_ids": af.Ragged.of([list(range(1, 13)), list(range(1, 20)), [7] * 15])}


class Told(Listener):
    """What a run said of versions."""

    def weights(self, state: str, worker: str = "") -> list[WeightState]:
        return [
            e for e in self.events
            if isinstance(e, WeightState) and e.state == state and (not worker or e.worker == worker)
        ]  # fmt: skip

    def loaded(self, worker: str) -> list[int]:
        return [e.version for e in self.events if isinstance(e, Loaded) and e.worker == worker]

    def restarts(self, worker: str) -> int:
        return [e.worker for e in self.states("restarting")].count(worker)


def spans_of(directory: Path) -> list[np.ndarray[Any, Any]]:
    """Of every trained row: the versions that drew it, one after another."""
    return [row[:, 0] for _, batch in af.read_steps(directory) for row in batch.ragged("version_spans")]


def rollout(**options: Any) -> dict[str, Any]:
    return {"replicas": 2, "max_rows": 8, "delay_s": 0.005, "spread": 1.0} | options


@pytest.mark.parametrize("swap", ["drain", "boundary", "partial", "in_flight"])
def test_rows_are_whole_and_within_their_staleness_whatever_the_policy(tmp_path: Path, swap: Any) -> None:
    told = Told()
    drawing = {swap: True, "token_s": 0.004, "delay_s": 0.0} if swap in ("partial", "in_flight") else {}

    result = echo_workflow(
        prompts=LONG, rollout=rollout(slow_load_s=0.002, **drawing), weights=af.Weights(swap=swap, verify=["held"]),
        staleness=af.Staleness(max_staleness=2), steps=8,
    ).run(tmp_path / "run", on_event=told)  # fmt: skip

    check_whole(result, 8)
    late = af.staleness_of(tmp_path / "run").values
    assert late.min() >= 0
    assert late.max() <= 2
    mixed = [versions for versions in spans_of(tmp_path / "run") if len(versions) > 1]
    assert bool(mixed) == (
        swap in ("partial", "in_flight")
    )  # tokens of one response by several versions, and each says by which
    assert len({e.version for e in told.events if isinstance(e, Span) and e.kind == "load"}) > 2


def test_at_a_boundary_nothing_is_drained_that_the_rule_would_still_admit(tmp_path: Path) -> None:
    told, gates = Told(), Gates(tmp_path / "gates", 2)

    def listen(event: Event) -> None:
        told(event)
        if isinstance(event, Loaded) and event.version > 0:  # which steps 6 and 7 may not be of
            gates.open(2)

    result = echo_workflow(
        rollout=rollout(delay_s=0.02, replicas=1), weights=af.Weights(swap="boundary"), train=gates.trainer(),
        staleness=af.Staleness(max_staleness=3), steps=8,
    ).run(tmp_path / "run", on_event=listen)  # fmt: skip

    check_whole(result, 8)
    assert len([e for e in told.events if isinstance(e, Span) and e.kind == "load"]) > 2
    assert not [
        e for e in told.events if isinstance(e, Span) and e.kind == "wait" and e.detail.startswith("draining")
    ]


def test_replicas_that_load_in_turn_all_load(tmp_path: Path) -> None:
    """That no two load at once while both could take prompts is tested in ledger/test_ledger_swaps.py."""
    told, gates, replicas = Told(), Gates(tmp_path / "gates", 1, 4), [f"rollout-{n}" for n in range(3)]

    def listen(event: Event) -> None:
        told(event)
        if isinstance(event, Loaded):  # else the run could be over before one of them has begun
            least = min(len(told.loaded(worker)) for worker in replicas)
            gates.open(*([1] if least else []), *([4] if least > 1 else []))

    result = echo_workflow(
        rollout=rollout(replicas=3, slow_load_s=0.03), weights=af.Weights(max_swapping=1), train=gates.trainer(), steps=5,
    ).run(tmp_path / "run", on_event=listen)  # fmt: skip

    check_whole(result, 5)
    assert all(len(told.loaded(worker)) > 1 for worker in replicas)


def test_a_quorum_goes_on_without_a_replica_that_sleeps(tmp_path: Path) -> None:
    """Two of three must have a version staged; the third sleeps for some steps. Its rows move on when its lease ends."""
    told, gates = Told(), Gates(tmp_path / "gates", 3, 6)
    asleep: list[int] = []

    def listen(event: Event) -> None:
        told(event)
        decided = max((e.version for e in told.events if isinstance(e, Committed)), default=-1)
        if not asleep and decided >= 1 and (pid := told.pids.get("rollout-2", 0)):
            asleep.append(pid)
            os.kill(pid, signal.SIGSTOP)
            gates.open(3)
        if len(asleep) == 1 and decided >= 5:
            asleep.append(os.kill(asleep[0], signal.SIGCONT) or 0)
            gates.open(6)

    options = {"prompt": "prompt_ids", "group_size": 4, "max_rows": 8, "lease_s": 0.5}
    sleeps = af.Rollout("echo", **options)
    others = af.Rollout("echo", replicas=2, launcher="thread", **options)
    result = echo_workflow(
        rollout=[others, sleeps], weights=af.Weights(quorum=2), train=gates.trainer(delay_s=0.02), steps=8
    ).run(tmp_path / "run", on_event=listen)  # fmt: skip

    check_whole(result, 8)
    assert len(asleep) == 2
    decided = {e.version: e.staged for e in told.events if isinstance(e, Committed)}
    assert all(staged >= 2 for staged in decided.values())
    swapping = [
        e
        for e in told.events
        if isinstance(e, (Committed, WeightState)) and getattr(e, "state", "swapping") == "swapping"
    ]
    known: set[int] = set()
    for event in swapping:
        if isinstance(event, Committed):
            known.add(event.version)
        else:
            assert event.version in known  # nobody loads what is not decided


@pytest.mark.parametrize("swap", ["drain", "in_flight"])
def test_a_load_that_fails_half_way_leaves_the_old_version_and_is_tried_again(tmp_path: Path, swap: Any) -> None:
    told, gates, replicas = Told(), Gates(tmp_path / "gates", 9), ("rollout-0", "rollout-1")
    options = rollout(
        engine="faulty_echo:FaultyRollout", fail_load_at=3, in_flight=swap == "in_flight", token_s=0.003
    )

    def listen(event: Event) -> None:
        told(event)
        if all(max(told.loaded(worker), default=-1) >= 3 for worker in replicas):  # each has tried again
            gates.open(9)

    result = echo_workflow(
        prompts=LONG, rollout=options, weights=af.Weights(swap=swap, keep=16), train=gates.trainer(), steps=10
    ).run(tmp_path / "run", on_event=listen)

    check_whole(result, 10)  # echo's trainer refuses rows of a mixture
    for worker in replicas:
        (failed,) = told.weights("failed", worker)
        assert "told to fail while loading version" in failed.detail
        assert max(told.loaded(worker)) >= failed.version
        assert told.restarts(worker) == 0


def test_a_poisoned_replica_ends_and_its_rows_move_on(tmp_path: Path) -> None:
    """It can neither load the new version nor the one it had; started again, it joins as any late one."""
    told = Told()

    result = echo_workflow(
        rollout=rollout(engine="faulty_echo:FaultyRollout", fail_load_at=3, fail_loads=2), train={"delay_s": 0.05}, steps=16
    ).run(tmp_path / "run", on_event=told)  # fmt: skip

    check_whole(result, 16)
    failed = told.states("failed")
    assert failed
    assert all("must not generate any more" in e.detail for e in failed)
    assert told.restarts("rollout-0") + told.restarts("rollout-1") >= 1


def test_names_that_never_match_end_the_run_by_name(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match=r"1 of 5 tensors were not taken by the engine: layer\.0\.weight"):
        echo_workflow(rollout=rollout(engine="faulty_echo:FaultyRollout", take_fewer_at=1)).run(tmp_path / "run")


def test_a_replica_killed_in_the_middle_of_a_load_is_started_again(tmp_path: Path) -> None:
    told, gates = Told(), Gates(tmp_path / "gates", 4)
    killed: list[int] = []

    def listen(event: Event) -> None:
        told(event)
        if (
            not killed
            and isinstance(event, WeightState)
            and event.state == "swapping"
            and event.version > 1
            and event.worker == "rollout-0"
        ):
            killed.append(told.pids[event.worker])
            os.kill(killed[0], signal.SIGKILL)
        if isinstance(event, WorkerState) and event.state == "restarting":
            gates.open(4)

    killable = af.Rollout("echo", prompt="prompt_ids", group_size=4, slow_load_s=0.1, max_rows=8)
    result = echo_workflow(
        rollout=killable, weights=af.Weights(max_swapping=1), train=gates.trainer(), steps=6,
    ).run(tmp_path / "run", on_event=listen)  # fmt: skip

    check_whole(result, 6)
    assert killed
    assert told.restarts("rollout-0") == 1


def test_every_version_is_proven_by_its_probe(tmp_path: Path) -> None:
    probe = af.Probe(((1, 2), (3,)), ((4, 5), (6, 7, 8)))
    told = Told()

    result = echo_workflow(
        rollout=rollout(engine="faulty_echo:FaultyRollout", ignore_at=4), weights=af.Weights(probe=probe, verify=["probe", "held"]),
        train={"delay_s": 0.02}, steps=8,
    ).run(tmp_path / "run", on_event=told)  # fmt: skip

    check_whole(result, 8)
    failed = told.weights("failed")
    assert {e.version for e in failed} <= {4}  # the only one that an engine only said it had taken
    assert all("sequence 0 of the probe, token 0: log-prob -3, the trainer's -4" in e.detail for e in failed)


class Partly(EchoTrain):
    untrained = ("a.w", "b.w", "c.w", "d.w")


def test_what_stays_as_in_the_model_folder_is_noted_once(tmp_path: Path) -> None:
    result = echo_workflow(train=af.Train(Partly, launcher="thread")).run(tmp_path / "run")

    noted = [note for note in events_of(tmp_path / "run", "note") if "in the model folder" in note["text"]]
    assert [note["text"] for note in noted] == ["4 tensors stay as in the model folder: a.w, b.w, c.w, …"]
    assert result.summary["warnings"] == []


def test_a_rollback_in_a_running_workflow(tmp_path: Path) -> None:
    """Replicas follow to the old weights under a new number; rows of what was given up expire; training goes on."""
    told, gates = Told(), Gates(tmp_path / "gates", 7)
    answers: list[int] = []

    def roll_back() -> None:
        with af.connect(tmp_path / "run", name="operator") as operator:
            current = operator.queue.status().version
            answers.append(operator.rollback(current - 1, "the reward fell").version)
        gates.open(7)

    def listen(event: Event) -> None:
        told(event)
        if isinstance(event, Loaded) and event.version >= 5 and not threads:
            threads.append(threading.Thread(target=roll_back))
            threads[0].start()

    threads: list[threading.Thread] = []
    result = echo_workflow(
        rollout=rollout(), train=gates.trainer(delay_s=0.02), weights=af.Weights(keep=4), steps=14
    ).run(tmp_path / "run", on_event=listen)
    threads[0].join()

    check_whole(result, 14)
    (number,) = answers
    published = {e.version: e for e in told.events if type(e).__name__ == "Published"}
    assert published[number].source < number - 1
    assert "the reward fell" in published[number].reason
    assert any(
        number in told.loaded(worker) or max(told.loaded(worker)) > number for worker in ("rollout-0", "rollout-1")
    )
    # of what was trained after it, nothing was made by a version that was given up
    given_up = range(published[number].source + 1, number)
    steps = {e.step: e.version for e in told.events if type(e).__name__ == "StepTrained"}
    after = [row for number_, batch in af.read_steps(tmp_path / "run") if steps[number_] > number + 1
             for row in batch.ragged("version_spans")]  # fmt: skip
    assert after
    assert not {int(v) for row in after for v in row[:, 0]} & set(given_up)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"keep": 0}, "keep must be 1 or more"),
        ({"quorum": -1}, "quorum must be 0 or more"),
        ({"quorum": 2}, "quorum=2 replicas must have a version staged .* there are 1"),
        ({"swap": "never"}, "swap must be 'auto' or .* or 'in_flight', not str: 'never'"),
        ({"verify": ["probe"]}, "verify needs a probe"),
        ({"verify": ["probe"], "probe": False}, "verify needs a probe"),
        ({"verify": ["digest"]}, "verify must be a list of 'probe' or 'held'"),
        ({"probe": af.Probe(((1,),), ())}, "at least one prompt, and as many responses"),
        ({"probe": af.Probe(((1,), ()), ((2,), (3,)))}, "sequence 1 of the probe has no prompt or no response"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(weights: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        echo_workflow(weights=af.Weights(**weights))


def test_an_unknown_transport_lists_the_known_ones() -> None:
    with pytest.raises(
        af.errors.PluginError, match=r"no transport adapter is named 'carrier-pigeon'; installed: .*shm"
    ):  # type: ignore[attr-defined]
        echo_workflow(weights=af.Weights(transport="carrier-pigeon"))


def test_an_engine_that_cannot_swap_so_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(
        WorkerFailed, match='EchoRollout cannot load weights while requests run, which swap="in_flight"'
    ):
        echo_workflow(weights=af.Weights(swap="in_flight")).run(tmp_path / "run")


def test_what_a_workflow_does_with_weights_is_in_its_description() -> None:
    said = echo_workflow(weights=af.Weights(swap="boundary", max_swapping=1)).describe()["weights"]
    assert (said["transport"], said["swap"], said["max_swapping"], said["keep"]) == ("shm", "boundary", 1, 2)
