"""Steps of real runs come as traces to a receiver of OTLP. The tests of asyncflow_mlflow send them to MLflow's."""

from __future__ import annotations

import math
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
from opentelemetry.proto.trace.v1.trace_pb2 import Span

import asyncflow_sdk as af
from asyncflow_otel.tracker import OtelTracker
from asyncflow_sdk.interfaces import TrackedRun
from asyncflow_sdk.testing import Conformance
from asyncflow_sdk.types import events as ev

GROUP, BATCH, STEPS = 4, 8, 4


class Receiver(ThreadingHTTPServer):
    """An OTLP receiver: ``spans`` by trace. ``resources``: their attributes."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.spans: dict[str, list[Span]] = defaultdict(list)
        self.resources: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_port}/v1/traces"


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


def run(directory: Path, endpoint: str) -> None:
    af.Workflow(
        prompts={"prompt_ids": af.Ragged.of([[1, 2, 3]] * 8)},
        rollout=af.Rollout("echo", group_size=GROUP, prompt="prompt_ids"),
        reward=lambda response_ids: [0.5] * len(response_ids),
        train=af.Train("echo"), batch_size=BATCH, steps=STEPS, track=[("otel", {"endpoint": endpoint})],
    ).run(directory)  # fmt: skip


@pytest.mark.starts("tracker otel")
def test_every_step_of_a_run_has_one_trace_with_the_work_of_its_time(receiver: Receiver, tmp_path: Path) -> None:
    before = time.time_ns()

    run(tmp_path / "first", receiver.url)

    assert receiver.resources[0]["service.name"] == "asyncflow"
    assert receiver.resources[0]["asyncflow.run"] == "first"
    roots, works = dict[int, Span](), list[Span]()
    for spans in receiver.spans.values():
        (root,) = (span for span in spans if not span.parent_span_id)
        assert {span.parent_span_id for span in spans if span is not root} <= {root.span_id}
        roots[attributes(root).get("asyncflow.step", STEPS)] = root
        works += [span for span in spans if span is not root]
    assert [roots[step].name for step in sorted(roots)] == ["step"] * STEPS + ["rest"]
    for step in range(STEPS):
        assert before < roots[step].start_time_unix_nano < roots[step].end_time_unix_nano < time.time_ns()
        assert roots[step].end_time_unix_nano == roots[step + 1].start_time_unix_nano
        assert attributes(roots[step])["asyncflow.reward"] == 0.5
    assert {"generate", "train", "publish"} <= {span.name for span in works}
    rows = defaultdict[str, int](int)
    for span in works:
        assert attributes(span)["asyncflow.worker"]
        assert before < span.start_time_unix_nano <= span.end_time_unix_nano < time.time_ns()
        rows[span.name] += attributes(span).get("asyncflow.rows", 0)
    assert rows["train"] == STEPS * BATCH
    assert rows["generate"] >= STEPS * BATCH


def test_work_without_a_length_is_left_out(receiver: Receiver, tmp_path: Path) -> None:
    tracker = OtelTracker(receiver.url)
    tracker.open(TrackedRun(directory=tmp_path, description={}))

    tracker.event(ev.Span(time_s=1.0, worker="w", kind="generate", seconds=math.nan))
    tracker.close()

    ((root,),) = receiver.spans.values()
    assert root.name == "rest"


def test_no_receiver_stops_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")

    run(tmp_path / "run", "http://127.0.0.1:9/v1/traces")
