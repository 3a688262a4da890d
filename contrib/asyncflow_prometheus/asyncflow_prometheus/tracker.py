"""PrometheusTracker: serves the metrics of a run at /metrics.

af.Workflow(..., track=[("prometheus", {"port": 9400})])      # curl http://127.0.0.1:9400/metrics
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

import asyncflow_sdk as af
from asyncflow_sdk.interfaces import TrackedRun, Tracker
from asyncflow_sdk.types import Event
from asyncflow_sdk.types import events as ev
from asyncflow_sdk.types.reports import StatusReport

ANSWER_S = 5.0
"""Time for the queue to answer one scrape (seconds)."""
MOST_CONNECTIONS = 32
"""The oldest is cut for another: idle ones keep nobody out."""


class PrometheusTracker(Tracker):
    """``port``: of the page; 0 picks one. ``address``: to listen at; the page is open to everybody who
    reaches it, so the default is this host only.

    Each scrape asks the queue for its status; nothing is computed between scrapes. ``url`` is the
    page's address once open.
    """

    def __init__(self, port: int = 9400, address: str = "127.0.0.1") -> None:
        self._port, self._address = port, address
        self._server = None

    def open(self, run: TrackedRun) -> None:
        self._metrics = _RunMetrics(run.directory)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self._metrics)
        self._server = _Server((self._address, self._port), _Handler)
        self._server.set_app(make_wsgi_app(registry))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://{self._address}:{self._server.server_port}/metrics"

    def log(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        self._metrics.trained(step, metrics)

    def event(self, event: Event) -> None:
        self._metrics.count(event)

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._metrics.close()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._open: deque[socket.socket] = deque()
        super().__init__(address, handler)

    def process_request(self, request: socket.socket, client_address: object) -> None:
        """Handle a connection in a thread, and cut the oldest if there are too many."""
        self._open.append(request)
        if len(self._open) > MOST_CONNECTIONS:
            with contextlib.suppress(OSError):  # it has ended
                self._open.popleft().shutdown(socket.SHUT_RDWR)  # its thread wakes, and closes it
        super().process_request(request, client_address)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore connections that were cut, or that sent nothing in time."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def shutdown_request(self, request: socket.socket) -> None:
        """Close a connection, in its thread."""
        with contextlib.suppress(ValueError):  # it was cut
            self._open.remove(request)
        super().shutdown_request(request)


class _Handler(WSGIRequestHandler):
    timeout = 10.0

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class _RunMetrics:
    """Metrics of a run, collected at a scrape. Thread-safe."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()  # guards the numbers of events; never held while the queue is asked
        self._asking = threading.Lock()  # scrapes ask one after another
        self._run: af.Run | None = None
        self._step, self._trained = -1, {}
        self._busy_s: Counter[tuple[str, str]] = Counter()
        self._tokens: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()

    def trained(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the numbers of a step."""
        with self._lock:
            self._step, self._trained = step, dict(metrics)

    def count(self, event: Event) -> None:
        """Add an event."""
        with self._lock:
            if isinstance(event, ev.Span):
                self._busy_s[event.worker, event.kind] += event.seconds
                self._tokens[event.worker] += event.tokens if event.kind == "generate" else 0
            elif isinstance(event, ev.WorkerState) and event.state in ("restarting", "failed"):
                self._failures[event.worker] += 1

    def close(self) -> None:
        """Disconnect from the run."""
        with self._asking:
            if self._run is not None:
                self._run.close()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics. Without an answer of the queue, those of events only."""
        with self._lock:
            metrics = list(self._of_events())
        yield from metrics
        with self._asking:
            try:
                self._run = self._run or af.connect(self._directory, name="prometheus", timeout_s=ANSWER_S)
                status = self._run.queue.status()
            except af.AsyncFlowError:
                yield _gauge("up", "1 if the queue answers", 0)
                return
        yield _gauge("up", "1 if the queue answers", 1)
        yield from _of_status(status)

    def _of_events(self) -> Iterator[Metric]:
        yield _gauge("step", "Number of the last trained step", self._step)
        yield _labelled("train", "Numbers of the last trained step", ["metric"], self._trained)
        yield _counted("worker_seconds", "Seconds of a worker, by activity", ["worker", "kind"], self._busy_s)
        yield _counted("generated_tokens", "Tokens generated", ["worker"], self._tokens)
        yield _counted("worker_failures", "Ends of a worker that failed", ["worker"], self._failures)


def _of_status(status: StatusReport) -> Iterator[Metric]:
    """Yield the metrics of a queue's status."""
    live = {(task, state): n for task, states in status.rows.items() for state, n in states.items()}
    yield _labelled("rows_live", "Live rows, by task and state", ["task", "state"], live)
    yield _counted("rows_put", "Rows put", [], {(): status.put})
    yield _counted("rows_ended", "Rows in a terminal state", ["state"], status.ended)
    yield _counted("rows_arrived", "Rows ready for a task", ["task"], status.arrived)
    yield _counted("rows_completed", "Rows completed by a task", ["task"], status.completed)
    yield _gauge("leases", "Leases", status.lease_count)
    yield _gauge("oldest_lease_seconds", "Age of the oldest lease", status.oldest.since_s if status.oldest else 0)
    waits: Counter[tuple[str, str]] = Counter()
    for parked in status.parked:
        waits[parked.name, parked.verb] = max(waits[parked.name, parked.verb], parked.since_s)
    yield _labelled("wait_seconds", "Time a client has waited, by its request", ["client", "request"], waits)
    yield _gauge("version", "Current version of the weights", status.version)
    yield _gauge("version_age_seconds", "Age of the current version", status.version_age_s)
    lags = {s.name: status.version - s.loaded for s in status.sessions if s.replica and s.loaded is not None}
    yield _labelled("replica_lag", "Published versions that a replica has not loaded", ["replica"], lags)
    yield _gauge("steps_wanted", "Steps to train; -1 without a limit", -1 if status.steps is None else status.steps)
    yield _gauge("staleness_limit", "Most versions of staleness; -1 without steps", status.max_staleness)
    if status.ages is not None:
        parts = {"in_flight": status.ages.in_flight_mean, "in_queue": status.ages.in_queue_mean}
        yield _labelled("staleness_mean", "Mean staleness of the step in training", ["part"], parts)
    yield _gauge("charged_bytes", "Payload of live rows, with the reserve for missing columns", status.charged_bytes)
    yield _gauge("capacity_bytes", "Limit of charged bytes", status.capacity_bytes)
    homes = {home.name: home.payload_bytes for home in status.homes} or {"server": status.payload_bytes}
    yield _labelled("payload_bytes", "Payload of live rows, by home", ["home"], homes)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"asyncflow_{name}", text, value=value)


def _labelled(name: str, text: str, labels: list[str], values: Mapping[str | tuple[str, ...], float]) -> Metric:
    return _filled(GaugeMetricFamily(f"asyncflow_{name}", text, labels=labels), values)


def _counted(name: str, text: str, labels: list[str], values: Mapping[str | tuple[str, ...], float]) -> Metric:
    return _filled(CounterMetricFamily(f"asyncflow_{name}", text, labels=labels), values)


def _filled(family: Metric, values: Mapping[str | tuple[str, ...], float]) -> Metric:
    for labels, value in values.items():
        family.add_metric([labels] if isinstance(labels, str) else list(labels), value)
    return family
