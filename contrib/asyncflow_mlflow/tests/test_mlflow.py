"""Runs are sent to a real MLflow server, and read from it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from mlflow import MlflowClient

import asyncflow_sdk as af
from asyncflow_mlflow.tracker import MlflowTracker
from asyncflow_sdk.interfaces import TrackedRun
from asyncflow_sdk.testing import Conformance


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an MLflow server with a folder of its own."""
    place = tmp_path_factory.mktemp("mlflow")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with (place / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
                "--backend-store-uri", f"sqlite:///{place}/mlflow.db", "--artifacts-destination", str(place / "artifacts"),
            ],
            stdout=log, stderr=log, start_new_session=True, cwd=place,
        )  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 240
        while True:
            try:
                urlopen(f"{address}/health", timeout=5).close()
                break
            except (URLError, OSError):
                assert process.poll() is None, (place / "server.log").read_text()
                assert time.monotonic() < until, (place / "server.log").read_text()
                time.sleep(0.2)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(autouse=True)
def tracked_there(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)


kit = Conformance("tracker", "mlflow")


@kit.parametrize
def test_contract(check: Any) -> None:
    check()


@pytest.mark.starts("tracker mlflow")
def test_the_steps_of_a_run_its_samples_and_configuration(tmp_path: Path, server: str) -> None:
    workflow = af.Workflow(
        prompts={"prompt_ids": af.Ragged.of([[1, 2, 3]] * 8)},
        rollout=af.Rollout("echo", group_size=4, prompt="prompt_ids"), reward=lambda response_ids: [0.5] * len(response_ids),
        train=af.Train("echo"), batch_size=8, steps=4, track=[("mlflow", {"experiment": "mine", "sample_every": 2})],
    )  # fmt: skip

    workflow.run(tmp_path / "first")

    client = MlflowClient(server)
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.params["batch_size"] == "8"
    rewards = client.get_metric_history(run.info.run_id, "train/reward")
    assert [(each.step, each.value) for each in rewards] == [(step, 0.5) for step in range(4)]
    assert "train/staleness_mean" in run.data.metrics
    table = json.loads(Path(client.download_artifacts(run.info.run_id, "samples.json", str(tmp_path))).read_text())
    assert {"step", "group", "reward", "response_ids"} <= set(table["columns"])
    assert [row[table["columns"].index("step")] for row in table["data"]] == [0] * 8 + [2] * 8
    described = client.download_artifacts(run.info.run_id, "workflow.json", str(tmp_path))
    assert json.loads(Path(described).read_text())["batch_size"] == 8


def test_a_resumed_run_is_the_same_run(tmp_path: Path, server: str) -> None:
    for again, step in ((False, 0), (True, 1)):
        tracker = MlflowTracker("resumed")
        tracker.open(TrackedRun(directory=tmp_path, description={}, resumed=again))
        tracker.log(step, step, {"reward": 0.5})
        tracker.close()

    client = MlflowClient(server)
    (run,) = client.search_runs([client.get_experiment_by_name("resumed").experiment_id])
    assert [each.step for each in client.get_metric_history(run.info.run_id, "train/reward")] == [0, 1]


def test_the_server_takes_the_traces_of_steps_by_otlp(tmp_path: Path, server: str) -> None:
    pytest.importorskip("asyncflow_otel")
    client = MlflowClient(server)
    experiment = client.create_experiment("steps")
    options = {"endpoint": f"{server}/v1/traces", "headers": {"x-mlflow-experiment-id": experiment}}

    af.Workflow(
        prompts={"prompt_ids": af.Ragged.of([[1, 2, 3]] * 8)},
        rollout=af.Rollout("echo", group_size=4, prompt="prompt_ids"),
        reward=lambda response_ids: [0.5] * len(response_ids),
        train=af.Train("echo"),
        batch_size=8,
        steps=2,
        track=[("otel", options)],
    ).run(tmp_path / "run")

    traces = client.search_traces(locations=[experiment])
    steps = [spans for spans in ({span.name: span for span in each.data.spans} for each in traces) if "step" in spans]
    assert sorted(spans["step"].attributes["asyncflow.step"] for spans in steps) == [0, 1]
    works = [span for spans in steps for name, span in spans.items() if name != "step"]
    assert {span.parent_id for span in works} <= {spans["step"].span_id for spans in steps}
    assert "generate" in {span.name for span in works}


def test_no_server_leaves_the_tracker_out_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    notes: list[str] = []

    with af.serve(tmp_path / "run", track=["mlflow"], on_event=lambda e: notes.append(getattr(e, "text", ""))) as run:
        run.queue.status()

    assert any("tracker 'mlflow' failed and is left out" in note for note in notes), notes
