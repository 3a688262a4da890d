"""Rows of real runs come as traces to a receiver of OTLP. The tests of asyncflow_mlflow send them to MLflow's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

import asyncflow_sdk as af
from asyncflow_otel.tracker import OtelTracker
from asyncflow_sdk.testing import Conformance
from asyncflow_sdk.types import events as ev
from asyncflow_sdk.types.row_spans import is_traced

GROUP, BATCH, STEPS = 4, 8, 4


class Receiver(ThreadingHTTPServer):
    """An OTLP receiver: ``spans`` by trace. ``resources``: their attributes."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.spans: dict[str, list[Span]] = defaultdict(list)
        self.resources: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_port}/v1/traces"

    def lives(self) -> dict[int, dict[str, Span]]:
        """The spans of each row, by name."""
        found = {}
        for spans in self.spans.values():
            (row,) = {attributes(span)["asyncflow.row"] for span in spans}
            found[row] = {span.name: span for span in spans}
        return found


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
        for resource in request.resource_spans:
            self.server.resources.append(attributes(resource.resource))
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.server.spans[span.trace_id.hex()].append(span)
        self.send_response(200 if self.path == "/v1/traces" else 404)
        self.send_header("Content-Type", "application/x-protobuf")
        self.end_headers()
        self.wfile.write(ExportTraceServiceResponse().SerializeToString())

    def log_message(self, *_: Any) -> None: ...


def attributes(thing: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in thing.attributes}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


kit = Conformance("tracker", "otel", options={"endpoint": "http://127.0.0.1:9/v1/traces"})


@kit.parametrize
def test_contract(check: Any) -> None:
    check()


def run(directory: Path, *, steps: int = STEPS, groups: int = 8, **options: Any) -> None:
    af.Workflow(
        prompts={"prompt_ids": af.Ragged.of([[1, 2, 3]] * groups)},
        rollout=af.Rollout("echo", group_size=GROUP, prompt="prompt_ids"),
        reward=lambda response_ids: [0.5] * len(response_ids),
        train=af.Train("echo"), batch_size=BATCH, steps=steps, track=[("otel", options)],
    ).run(directory)  # fmt: skip


@pytest.mark.starts("tracker otel")
def test_every_row_of_a_run_has_one_trace_from_its_put_to_its_step(receiver: Receiver, tmp_path: Path) -> None:
    before = time.time_ns()

    run(tmp_path / "first", ratio=1.0, endpoint=receiver.url)

    assert receiver.resources[0]["service.name"] == "asyncflow"
    assert receiver.resources[0]["asyncflow.run"] == "first"
    lives = receiver.lives()
    trained = {
        row: spans for row, spans in lives.items() if attributes(spans["row"])["asyncflow.state"] == "consumed"
    }
    assert len(trained) == STEPS * BATCH
    assert sum(map(len, receiver.spans.values())) == sum(map(len, lives.values())), "each span came once"
    for spans in trained.values():
        root = spans["row"]
        assert spans.keys() == {"row", "wait rollout", "rollout", "wait reward", "reward", "wait train", "train"}
        assert not root.parent_span_id
        assert {span.parent_span_id for span in spans.values() if span is not root} == {root.span_id}
        assert len({span.span_id for span in spans.values()}) == len(spans)
        assert before < root.start_time_unix_nano <= root.end_time_unix_nano < time.time_ns()
        assert all(
            root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
            for span in spans.values()
        )
        assert spans["wait rollout"].end_time_unix_nano == spans["rollout"].start_time_unix_nano
        drawn, step = attributes(spans["rollout"]), attributes(spans["train"])
        assert drawn["asyncflow.worker"].startswith("rollout")
        assert drawn["asyncflow.attempt"] == 1
        assert step["asyncflow.staleness"] == step["asyncflow.step"] - drawn["asyncflow.version"]
        assert attributes(root)["asyncflow.step"] == step["asyncflow.step"]
        assert root.status.code == Status.STATUS_CODE_UNSET


def test_a_sample_has_whole_groups_chosen_by_their_ids(receiver: Receiver, tmp_path: Path) -> None:
    run(tmp_path / "run", ratio=0.4, endpoint=receiver.url, groups=10)

    groups: dict[int, set[int]] = defaultdict(set)
    for row, spans in receiver.lives().items():
        groups[attributes(spans["row"])["asyncflow.group"]].add(row)
    assert len(groups) > 1
    assert all(is_traced(group, 0.4) and rows == set(range(group, group + GROUP)) for group, rows in groups.items())


def traced(time_s: float, state: str, **more: Any) -> ev.RowsTraced:
    return ev.RowsTraced(time_s=time_s, group=0, rows=[0], state=state, **more)


def test_a_resumed_run_continues_the_traces_of_its_rows(receiver: Receiver, tmp_path: Path) -> None:
    now = time.monotonic()
    first = [
        traced(now, "put"),
        traced(now, "ready", task="rollout"),
        traced(now + 1, "leased", task="rollout", worker="a"),
    ]
    second = [
        traced(now + 2, "returned", task="rollout", reason="its server was killed"),
        traced(now + 3, "leased", task="rollout", worker="b"), traced(now + 4, "done", task="rollout"),
        traced(now + 5, "consumed"),
    ]  # fmt: skip
    for events, earlier in ((first, []), (second, first)):
        tracker = OtelTracker(1.0, receiver.url)
        tracker.open(af.TrackedRun(directory=tmp_path, description={}, resumed=bool(earlier), earlier_events=earlier))
        for event in events:
            tracker.event(event)
        tracker.close()

    (spans,) = receiver.spans.values()
    names = [(span.name, attributes(span).get("asyncflow.attempt", 0)) for span in spans]
    assert sorted(names) == [("rollout", 1), ("rollout", 2), ("row", 0), ("wait rollout", 1), ("wait rollout", 2)]
    assert len({span.span_id for span in spans}) == 5
    (root,) = (span for span in spans if span.name == "row")
    assert root.end_time_unix_nano - root.start_time_unix_nano == pytest.approx(5e9, rel=1e-6)
    (lost,) = (span for span in spans if span.status.code == Status.STATUS_CODE_ERROR)
    assert lost.status.message == "its server was killed"


PROGRAM = """
import sys
import asyncflow_sdk as af

def half(response_ids):
    return [0.5] * len(response_ids)

if __name__ == "__main__":
    from killed import half
    af.Workflow(
        prompts={"prompt_ids": af.Ragged.of([[1, 2, 3]] * 8)},
        rollout=af.Rollout("echo", group_size=4, prompt="prompt_ids"), reward=half, train=af.Train("echo"),
        batch_size=8, steps=60, checkpoint=af.Checkpoint(every=2),
        track=[("otel", {"ratio": 1.0, "endpoint": sys.argv[2]})],
    ).run(sys.argv[1])
"""


def test_a_run_that_is_killed_and_resumed_has_one_root_for_each_row(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "killed.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = [sys.executable, "killed.py", "run", receiver.url]
    with subprocess.Popen(arguments, cwd=tmp_path, start_new_session=True) as process:
        events = tmp_path / "run" / "events.jsonl"
        try:
            until = time.monotonic() + 200
            while not (events.exists() and events.read_bytes().count(b'"event":"step"') >= 5):
                assert process.poll() is None
                assert time.monotonic() < until
                time.sleep(0.01)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            killed_ns = time.time_ns()

    af.Workflow.resume(tmp_path / "run")

    roots: dict[int, list[Span]] = defaultdict(list)
    for trace_id, spans in receiver.spans.items():
        assert len({span.span_id for span in spans}) == len(spans), trace_id
        for span in spans:
            if span.name == "row":
                roots[attributes(span)["asyncflow.row"]].append(span)
    assert {len(each) for each in roots.values()} == {1}
    over = [root for (root,) in roots.values() if root.start_time_unix_nano < killed_ns < root.end_time_unix_nano]
    assert over, "rows put before the kill ended after it"
    for root in over:
        spans = receiver.spans[root.trace_id.hex()]
        assert {span.parent_span_id for span in spans if span is not root} <= {root.span_id}


def test_no_receiver_stops_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")

    run(tmp_path / "run", ratio=1.0, endpoint="http://127.0.0.1:9/v1/traces", steps=1)


def test_a_ratio_of_nothing_is_refused() -> None:
    with pytest.raises(af.ConfigError, match="ratio is a share of groups above 0"):
        OtelTracker(0.0)
