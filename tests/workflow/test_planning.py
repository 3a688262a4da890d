"""What is chosen, for which reason, and what is refused: by the driver, or by the engine in its worker."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from echo_runs import TOML, echo_workflow, events_of
from plugin_packages import install_plugin

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, WorkerFailed
from asyncflow_sdk.testing import EchoRollout

SPECS = """
import asyncflow_sdk as af
@af.hookimpl
def asyncflow_adapters():
    def rollout(name, factory, **can):
        return af.AdapterSpec(kind="rollout", name=name, factory=f"test_planning:{factory}", can=can)
    return [
        rollout("running", "InFlightOnly", swap=["in_flight"]),
        rollout("nothing", "InFlightOnly", swap=[]),
        rollout("unmapped", "OnlyByFile", swap=["drain"], transports=["file", "tcp"]),
        rollout("special", "OnlyByFile", transports=["cuda-ipc", "hand"]),
        rollout("liar", "OnlyByFile", transports=["shm"]),
        af.AdapterSpec(kind="launcher", name="far", factory="asyncflow_sdk.workflow.processes.launchers:ProcessLauncher", can={"hosts": "many"}),
        af.AdapterSpec(kind="transport", name="hand", factory="asyncflow_sdk.weights.transports.tcp:TcpTransport", can={"hosts": "many"}),
    ]
"""


class InFlightOnly(EchoRollout):
    def __init__(self, model: str = "") -> None:
        super().__init__(in_flight=True)
        self.capabilities = af.Capabilities(swap={"in_flight"}, token_versions=True, max_rows=64)


class Mute(EchoRollout):
    """Takes weights in flight, and does not say which version drew what."""

    def __init__(self, model: str = "") -> None:
        super().__init__()
        self.capabilities = af.Capabilities(swap={"in_flight"}, max_rows=64)


class OnlyByFile(EchoRollout):
    def __init__(self, model: str = "") -> None:
        super().__init__()
        self.capabilities = af.Capabilities(max_rows=64, transports={"file", "tcp"})


@pytest.fixture(autouse=True)
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Engines, a launcher and a transport that declare what they can."""
    return install_plugin(tmp_path, monkeypatch, "planned", SPECS)


def rollout(engine: str, **options: Any) -> af.Rollout:
    return af.Rollout(engine, **({"group_size": 4, "prompt": "prompt_ids"} | options))


def chosen(flow: af.Workflow) -> dict[str, str]:
    return {choice.what: str(choice) for choice in flow.plan.choices}


@pytest.mark.parametrize(
    ("changes", "what", "said"),
    [
        ({}, "transport", "shm: everything is on this host, so nothing is moved"),
        ({}, "encoding", "mapped: shm moves nothing"),
        ({"rollout": "timed"}, "swap of rollout timed", "drain: engine 'timed' can, and each response is of one version then"),
        ({"rollout": "running"}, "swap of rollout running", "in_flight: engine 'running' can load in no other way"),
        ({}, "swap of rollout echo", "auto: engine 'echo' says in its worker what it can, before the first prompt"),
        ({"weights": {"swap": "boundary"}}, "swap of rollout echo", "boundary: as asked; engine 'echo' says in its worker whether it can"),
        ({"rollout": "timed", "weights": {"swap": "in_flight"}}, "swap of rollout timed", "in_flight: as asked"),
        (
            {"rollout": "unmapped"}, "transport",
            "tcp: shm: engine 'unmapped' cannot take weights by shm, only by file, tcp",
        ),
        ({"rollout": "unmapped"}, "encoding", "delta: without loss, wherever it is smaller than the whole"),
        ({"rollout": "unmapped", "weights": {"keep": 1}}, "encoding", "full: keep=1, and a delta is against the version before"),
        ({"rollout": "unmapped", "weights": {"options": {"delta_bytes": 0}}}, "encoding", "full: delta_bytes=0"),
        ({"rollout": "special"}, "transport", "cuda-ipc: shm: engine 'special' cannot take weights by shm, only by cuda-ipc, hand; tcp: "),
        ({"place": {"launcher": "far"}}, "transport", "tcp: shm: it works on one host, and launcher 'far' may start workers on other hosts"),
        ({"place": {"launcher": "far"}, "weights": {"transport": "shm"}}, "transport", "shm: as asked"),
        ({"weights": {"transport": "tcp"}}, "transport", "tcp: as asked"),
        ({"place": {"device": "cuda"}, "train": {"device": "cuda:1"}}, "transport", "shm: everything is on this host, so nothing is moved; cuda-ipc"),
    ],
)  # fmt: skip
def test_what_is_chosen_is_told_with_its_reason(changes: dict[str, Any], what: str, said: str) -> None:
    flow = given(changes, bare=True)

    assert chosen(flow)[what].startswith(said)
    assert f"  {what}: {said}" in str(flow)
    assert flow.describe()["choices"][what].startswith(said)


def given(changes: dict[str, Any], *, bare: bool = False) -> af.Workflow:
    """``bare``: an engine in another interpreter, whose options and whose device nobody can check here."""
    place = dict(changes.get("place", {}))
    train: dict[str, Any] = dict(changes.get("train", {}))
    if bare:
        place["python"] = train["python"] = sys.executable
    return echo_workflow(
        rollout=rollout(changes.get("rollout", "echo"), **place), train=af.Train("echo", **train),
        weights=af.Weights(**changes.get("weights", {})), steps=2,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": "timed", "weights": {"swap": "partial"}}, "engine 'timed' cannot load weights between the parts of a response, which"),
        ({"rollout": "running", "weights": {"swap": "drain"}}, "engine 'running' cannot load weights after draining"),
        ({"rollout": "nothing"}, "engine 'nothing' cannot be given new weights: it can load them never"),
        ({"rollout": "unmapped", "weights": {"transport": "shm"}}, "transport='shm' cannot work: engine 'unmapped' cannot take weights by shm, only by file, tcp"),
        ({"weights": {"transport": "pigeon"}}, "no transport adapter is named 'pigeon'; installed: "),
        (
            {"rollout": "special", "place": {"launcher": "far"}, "weights": {"transport": "tcp"}},
            "transport='tcp' cannot work: engine 'special'",
        ),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_anything_starts(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(af.AsyncFlowError, match=message):
        given(changes)


def test_where_nothing_fits_each_one_is_told_why() -> None:
    both = [rollout("unmapped"), rollout("liar")]
    with pytest.raises(ConfigError) as error:
        echo_workflow(rollout=both)
    assert "no transport can work: shm: engine 'unmapped' cannot take weights by shm" in str(error.value)
    assert "tcp: engine 'liar' cannot take weights by tcp, only by shm" in str(error.value)


def test_a_file_is_told_the_keys_of_what_cannot_work(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        TOML.replace('rollout = { engine = "echo"', 'rollout = { engine = "timed"')
        + '[weights]\nswap = "partial"\ntransport = "pigeon"\n'
    )
    with pytest.raises(ConfigError) as error:
        af.load_workflow(file)
    assert "run.toml: weights.swap: engine 'timed' cannot load weights between" in str(error.value)
    assert "run.toml: weights.transport: no transport adapter is named 'pigeon'" in str(error.value)


def test_driver_and_worker_say_what_was_chosen(tmp_path: Path) -> None:
    flow = echo_workflow(steps=2, rollout=rollout("test_planning:InFlightOnly", launcher="thread"))

    assert flow.run(tmp_path / "run").summary["steps"] == 2

    said = {(e.get("worker", ""), e["what"]): e["chosen"] for e in events_of(tmp_path / "run", "chosen")}
    assert said["", "transport"] == "shm"
    assert said["", "swap of rollout test_planning:InFlightOnly"] == "auto"
    assert said["rollout-0", "swap"] == "in_flight"


def test_a_broken_plugin_is_a_warning_of_the_run_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_plugin(tmp_path, monkeypatch, "brittle", "raise RuntimeError('on purpose')\n")

    echo_workflow(steps=1).run(tmp_path / "run")

    (text,) = [note["text"] for note in events_of(tmp_path / "run", "note") if note.get("level") == "warning"]
    assert text.startswith("plugin 'brittle' of brittle 1.0: RuntimeError: on purpose; pip install -U brittle")


@pytest.mark.parametrize(
    ("engine", "weights", "message"),
    [
        ("Mute", {}, "Mute cannot be given new weights: it can load them in_flight, and does not say which version"),
        (
            "InFlightOnly",
            {"swap": "drain"},
            'InFlightOnly cannot load weights after draining, which swap="drain" does',
        ),
        ("OnlyByFile", {"transport": "shm"}, "cannot take weights by shm, only by file, tcp; say Weights"),
    ],
)
def test_what_only_the_engine_knows_it_says_before_the_first_prompt(
    tmp_path: Path, engine: str, weights: dict[str, Any], message: str
) -> None:
    # given: an engine that no plugin declares
    flow = echo_workflow(rollout=rollout(f"test_planning:{engine}", launcher="thread"), weights=af.Weights(**weights))

    with pytest.raises(WorkerFailed, match=message):
        flow.run(tmp_path / "run")

    spans = events_of(tmp_path / "run", "span")
    assert not [span for span in spans if span["kind"] == "generate"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 0


def test_a_transport_that_the_worker_lacks_is_told_before_the_first_prompt(
    tmp_path: Path, plugin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given: the driver has transport "hand" from a plugin; the worker's interpreter does not see it
    flow = echo_workflow(
        rollout=rollout("echo", python=sys.executable, env={"ASYNCFLOW_NO_PLUGINS": "planned"}),
        weights=af.Weights(transport="hand"),
    )
    monkeypatch.setenv("PYTHONPATH", f"{plugin}:{':'.join(p for p in sys.path if p)}")

    with pytest.raises(WorkerFailed, match="no transport adapter is named 'hand'"):
        flow.run(tmp_path / "run")


def test_a_run_that_others_reach_from_other_hosts_publishes_by_tcp(tmp_path: Path) -> None:
    with af.serve(tmp_path / "near", address="tcp://127.0.0.1:0") as run, run.weight_publisher() as publisher:
        assert publisher.transport == "shm"
    with af.serve(tmp_path / "far", address="tcp://0.0.0.0:0") as run:
        with run.weight_publisher() as publisher:
            assert publisher.transport == "tcp"
        with af.connect(run.addresses[1]) as other, other.weight_publisher() as publisher:
            assert publisher.transport == "tcp"
