"""A run is scraped by a real Prometheus, and all rules and queries of the dashboard are executed there."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import asyncflow_sdk as af
from asyncflow_prometheus.tracker import MOST_CONNECTIONS, PrometheusTracker
from asyncflow_sdk.testing import Conformance
from asyncflow_sdk.types import events as ev
from asyncflow_sdk.workflow.processes.ranks import free_port

kit = Conformance("tracker", "prometheus", options={"port": 0})
RULES = resources.files("asyncflow_prometheus") / "rules.yml"
needs_prometheus = pytest.mark.skipif(not shutil.which("prometheus"), reason="needs Debian's package prometheus")


@kit.parametrize
def test_contract(check: Any) -> None:
    check()


def until(condition: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + 200
    while not (found := condition()):
        assert time.monotonic() < end, f"{what} did not come"
        time.sleep(0.2)
    return found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The page of a run with a trained step, a failed worker, a lease and a client that waits."""
    port = free_port()
    tracker = PrometheusTracker(port=port)
    with (
        af.serve(tmp_path_factory.mktemp("run"), track=[tracker], max_staleness=1, steps=9) as run,
        run.weight_publisher() as weights,
    ):
        run.queue.declare("rollout", needs=["prompt"], gives=["response_ids", "version_spans"], admits=True)
        run.queue.declare("train", needs=["response_ids", "version_spans"], batch_rows=2)
        weights.publish(0, {"w": np.zeros(2, np.float32)})
        run.queue.put({"prompt": ["a", "b", "c", "d"]})
        with af.connect(run.address, name="engine") as engine, engine.weight_updates() as updates:
            with next(iter(updates)) as update:
                update.took([name for name, _ in update.arrays()])
            with engine.queue.get("rollout", 2) as batch:
                batch.complete({"response_ids": [[1, 2], [3]], "version_spans": [[[0, 0, 2]], [[0, 0, 1]]]})
            steps = iter(run.consumer("train"))  # kept: the end of the loop gives the step back
            step = next(steps)
            for event in (
                ev.StepTrained(time_s=0.0, step=0, version=0, metrics={"reward": 0.5}),
                ev.Span(time_s=0.0, worker="engine", kind="generate", seconds=2.0, tokens=300),
                ev.WorkerState(time_s=0.0, worker="engine", state="failed"),
            ):
                run.report(event)
            until(
                lambda: hasattr(tracker, "url") and 'reward"} 0.5' in urlopen(tracker.url).read().decode(), "the step"
            )
            yield tracker.url
            step.ack()


def test_the_page_has_the_state_of_the_run(page: str) -> None:
    families = {f.name: f for f in text_string_to_metric_families(urlopen(page).read().decode())}
    values = {(s.name, tuple(s.labels.values())): s.value for family in families.values() for s in family.samples}

    assert values["asyncflow_up", ()] == 1
    assert values["asyncflow_rows_put_total", ()] == 4
    assert values["asyncflow_train", ("reward",)] == 0.5
    assert values["asyncflow_generated_tokens_total", ("engine",)] == 300
    assert values["asyncflow_worker_failures_total", ("engine",)] == 1
    assert values["asyncflow_replica_lag", ("engine",)] == 0
    assert values["asyncflow_leases", ()] == 1
    assert values["asyncflow_steps_wanted", ()] == 9


def test_connections_that_send_nothing_keep_no_scrape_out_and_no_thread(page: str) -> None:
    before = threading.active_count()
    host, port = page.split("/")[2].split(":")
    idle = [socket.create_connection((host, int(port))) for _ in range(3 * MOST_CONNECTIONS)]

    assert b"asyncflow_up 1.0" in urlopen(page, timeout=100).read()
    until(lambda: threading.active_count() - before <= MOST_CONNECTIONS, "the end of the threads of the oldest")
    until(lambda: threading.active_count() <= before, "the end of all threads")
    for each in idle:
        each.close()


def test_a_port_in_use_leaves_the_tracker_out_with_its_reason(tmp_path: Path) -> None:
    notes: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        tracker = PrometheusTracker(port=taken.getsockname()[1])
        with af.serve(tmp_path / "run", track=[tracker], on_event=lambda e: notes.append(getattr(e, "text", ""))):
            until(lambda: any("Address already in use" in note for note in notes), "the warning")


@needs_prometheus
def test_promtool_accepts_the_rules() -> None:
    done = subprocess.run(["promtool", "check", "rules", str(RULES)], capture_output=True, text=True, timeout=100)

    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def prometheus(page: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """A function that asks a Prometheus that scrapes the run."""
    place, port = tmp_path_factory.mktemp("prometheus"), free_port()
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "run", "static_configs": [{"targets": [page.split("/")[2]]}]}],
    }
    (place / "prometheus.yml").write_text(json.dumps(config))
    with (place / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus", f"--config.file={place}/prometheus.yml", f"--storage.tsdb.path={place}/data",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log, stderr=log,
        )  # fmt: skip

    def get(path: str, **query: str) -> Any:
        with urlopen(f"http://127.0.0.1:{port}/api/v1/{path}?{urlencode(query)}", timeout=30) as answer:
            said = json.load(answer)
        assert said["status"] == "success", said
        return said["data"]

    def answers() -> bool:
        assert process.poll() is None, (place / "log").read_text()
        try:
            return bool(get("query", query="asyncflow:rows_per_second")["result"])
        except OSError:
            return False

    try:
        until(answers, "a rule's first value")
        yield get
    finally:
        process.terminate()
        process.wait(60)


@needs_prometheus
def test_every_query_of_the_dashboard_has_an_answer(prometheus: Callable[..., Any]) -> None:
    board = json.loads((resources.files("asyncflow_prometheus") / "dashboard.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]

    without = [query for query in queries if not prometheus("query", query=query)["result"]]

    assert set(without) <= {"asyncflow_wait_seconds"}, "nobody waits in this run"


@needs_prometheus
def test_every_rule_is_evaluated_and_no_alert_fires(prometheus: Callable[..., Any]) -> None:
    def rules() -> list[Any]:
        (group,) = prometheus("rules")["groups"]
        return list(group["rules"]) if all(rule["health"] != "unknown" for rule in group["rules"]) else []

    evaluated = until(rules, "the evaluation of all rules")

    assert {rule["health"] for rule in evaluated} == {"ok"}, evaluated
    assert {rule["name"] for rule in evaluated if rule.get("state") == "firing"} == set()
