"""OtelTracker: sends the lives of sampled rows as OpenTelemetry traces by OTLP over HTTP.

af.Workflow(..., track=[("otel", {"ratio": 0.01, "endpoint": "http://127.0.0.1:4318/v1/traces"})])
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from hashlib import blake2b

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

import asyncflow_sdk as af
from asyncflow_sdk.types import Event
from asyncflow_sdk.types.row_spans import LIFE, TRACED_SHARE, RowSpan, RowSpans

RUN_ID = "otel-run-id"
"""File in the run's directory: a resumed run continues the same traces."""
MOST_WAITING = 65_536
"""Spans that wait for the receiver; further ones are dropped."""
SEND_EVERY_MS = 1000
"""A killed process loses the spans of its last second."""
TRACED = trace.TraceFlags(trace.TraceFlags.SAMPLED)


class OtelTracker(af.Tracker):
    """``ratio``: share of groups of rows to trace, above 0 to 1, chosen by their ids. ``endpoint``: of
    the receiver; default: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT and its like, else this host.
    ``headers``: of each request.

    One trace a row: its root lasts from put to end, below it lie each task's waits and work. Ids are
    derived from the row's id, so a resumed run continues its traces.
    """

    def __init__(
        self, ratio: float = TRACED_SHARE, endpoint: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        if not 0 < ratio <= 1:
            raise af.ConfigError(f"ratio is a share of groups above 0, at most 1, not {ratio}")
        self.trace_share = ratio
        self._exporter = OTLPSpanExporter(endpoint, headers=None if headers is None else dict(headers))

    def open(self, run: af.TrackedRun) -> None:
        known = run.directory / RUN_ID
        if not (run.resumed and known.exists()):
            known.write_text(secrets.token_hex(16))
        self._ids = _RowIds(known.read_text().strip())
        self._provider = TracerProvider(
            ALWAYS_ON,
            Resource.create({"service.name": "asyncflow", "asyncflow.run": run.directory.name}),
            shutdown_on_exit=False,
            id_generator=self._ids,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(self._exporter, max_queue_size=MOST_WAITING, schedule_delay_millis=SEND_EVERY_MS)
        )
        self._tracer = self._provider.get_tracer("asyncflow")
        self._spans = RowSpans(self.trace_share)
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        for event in run.earlier_events:
            self._spans.add(event)

    def log(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        pass

    def event(self, event: Event) -> None:
        for span in self._spans.add(event):
            self._send(span)

    def close(self) -> None:
        self._provider.shutdown()

    def _send(self, span: RowSpan) -> None:
        self._ids.span = span
        parent = Context()
        if span.name != LIFE:
            root = trace.SpanContext(self._ids.trace_of(span.row), self._ids.root_of(span.row), False, TRACED)
            parent = trace.set_span_in_context(trace.NonRecordingSpan(root), parent)
        sent = self._tracer.start_span(
            span.name,
            parent,
            start_time=self._unix_ns(span.start_s),
            attributes={f"asyncflow.{name}": value for name, value in span.attributes.items()},
        )
        if span.reason and span.state in ("", "failed"):
            sent.set_status(trace.StatusCode.ERROR, span.reason)
        sent.end(self._unix_ns(span.end_s))

    def _unix_ns(self, time_s: float) -> int:
        return self._epoch_ns + round(time_s * 1e9)


class _RowIds(IdGenerator):
    """Ids of ``span``, derived from its row in the run ``run_id``."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self.span: RowSpan

    def generate_trace_id(self) -> int:
        return self.trace_of(self.span.row)

    def generate_span_id(self) -> int:
        return self._derived(8, self.span.row, self.span.name, self.span.attempt)

    def trace_of(self, row: int) -> int:
        return self._derived(16, row)

    def root_of(self, row: int) -> int:
        return self._derived(8, row, LIFE, 0)

    def _derived(self, nbytes: int, *of: object) -> int:
        digest = blake2b(repr((self._run_id, *of)).encode(), digest_size=nbytes).digest()
        return int.from_bytes(digest, "big") or 1  # 0 is no id
