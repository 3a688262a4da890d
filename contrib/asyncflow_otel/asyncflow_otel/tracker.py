"""OtelTracker: sends the steps of a run, with the work of its workers, as OpenTelemetry traces by OTLP over HTTP.

af.Workflow(..., track=[("otel", {"endpoint": "http://127.0.0.1:4318/v1/traces"})])
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from asyncflow_sdk.interfaces import TrackedRun, Tracker
from asyncflow_sdk.types import Event
from asyncflow_sdk.types.events import Span, StepTrained

MOST_WAITING = 65_536
"""Spans that wait for the receiver; further ones are dropped."""
SEND_EVERY_MS = 1000
"""A killed process loses the spans of its last second."""


class OtelTracker(Tracker):
    """``endpoint``: of the receiver; default: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT and its like, else this
    host. ``headers``: of each request.

    One trace a step: its root lasts from the end of the step before, and below it lies the work
    reported in this time. Work after the last step is below a root "rest".
    """

    def __init__(self, endpoint: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        self._exporter = OTLPSpanExporter(endpoint, headers=None if headers is None else dict(headers))

    def open(self, run: TrackedRun) -> None:
        self._provider = TracerProvider(
            ALWAYS_ON,
            Resource.create({"service.name": "asyncflow", "asyncflow.run": run.directory.name}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(self._exporter, max_queue_size=MOST_WAITING, schedule_delay_millis=SEND_EVERY_MS)
        )
        self._tracer = self._provider.get_tracer("asyncflow")
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        self._begin(time.monotonic())

    def log(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        pass

    def event(self, event: Event) -> None:
        if isinstance(event, Span) and math.isfinite(event.time_s + event.seconds):
            self._work(event)
        elif isinstance(event, StepTrained):
            values = {"step": event.step, "version": event.version, **event.metrics}
            self._root.set_attributes({f"asyncflow.{name}": value for name, value in values.items()})
            self._root.update_name("step")
            self._root.end(self._unix_ns(event.time_s))
            self._begin(event.time_s)

    def close(self) -> None:
        self._root.end()
        self._provider.shutdown()

    def _begin(self, time_s: float) -> None:
        self._root = self._tracer.start_span("rest", Context(), start_time=self._unix_ns(time_s))

    def _work(self, work: Span) -> None:
        values = {name: getattr(work, name) for name in ("worker", "rows", "tokens", "detail") if getattr(work, name)}
        if work.version >= 0:
            values["version"] = work.version
        span = self._tracer.start_span(
            work.kind,
            trace.set_span_in_context(self._root, Context()),
            start_time=self._unix_ns(work.time_s),
            attributes={f"asyncflow.{name}": value for name, value in values.items()},
        )
        span.end(self._unix_ns(work.time_s + work.seconds))

    def _unix_ns(self, time_s: float) -> int:
        return self._epoch_ns + round(time_s * 1e9)
