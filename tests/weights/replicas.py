"""A served run with its trainer's publisher and replicas in this process, and the events that it reports."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.interfaces import Publication
from asyncflow_sdk.types import Probe
from asyncflow_sdk.types.events import Event, Note, WeightState
from asyncflow_sdk.weights import TransportSubscriber

LIMIT_S = 60.0
"""Only ends a test that would hang."""
PROBE = Probe(((1,),), ((2,),), ((-0.5,),))


def model(version: float) -> dict[str, Any]:
    """Tensors of three dtypes that all hold the version."""
    return {
        "w": np.full(1000, version, np.float32),
        "b": np.full((3, 5), version, ml_dtypes.bfloat16),
        "s": np.array(version, np.float64),
    }


def value_of(update: Any) -> float:
    """The one number that all tensors of an update hold."""
    (value,) = {float(v) for _, array in update.arrays() for v in np.asarray(array, np.float64).reshape(-1)}
    return value


class Served:
    """``limits``: of `serve`. ``transport``: of the publisher, which is made when it is first asked for."""

    def __init__(self, transport: str = "auto", **limits: Any) -> None:
        self.events: list[Event] = []
        self.run = af.serve(on_event=self.events.append, **limits)
        self.transport = transport
        self._ending = contextlib.ExitStack()
        self._publisher: Any = None

    @property
    def address(self) -> str:
        """For clients on this host, who need no key."""
        return self.run.addresses[1]

    @property
    def directory(self) -> Path:
        """The run's shared memory."""
        return Path(self.address.removeprefix("ipc://")).parent

    def client(self, name: str, **options: Any) -> af.Run:
        return self._ending.enter_context(af.connect(self.address, name=name, **options))

    def trainer(self, name: str = "trainer", **options: Any) -> Any:
        """A publisher on a connection of its own."""
        return self.client(name).weight_publisher(**{"transport": self.transport, **options})

    @property
    def publisher(self) -> Any:
        if self._publisher is None:
            self._publisher = self._ending.enter_context(self.trainer())
        return self._publisher

    def publish(self, version: int, weights: Any = None, **options: Any) -> Publication:
        """Returns once it is current."""
        publication: Publication = self.publisher.publish(version, weights or model(version), **options)
        publication.wait(LIMIT_S)
        return publication

    def replica(self, name: str = "replica", **options: Any) -> TransportSubscriber:
        """A loop's updates on a connection of their own; closed with the run."""
        updates = self.client(name).weight_updates(**{"timeout_s": LIMIT_S, **options})
        return self._ending.enter_context(updates)

    @contextlib.contextmanager
    def newest(self) -> Iterator[Any]:
        """The current version, as a new replica gets it; it is not loaded."""
        with self.client("newest") as client, client.weight_updates(timeout_s=LIMIT_S) as updates:
            yield next(iter(updates))

    def current(self) -> tuple[int, float]:
        """The current version as a new replica gets it: its number and its one value."""
        with self.newest() as update:
            return update.version, value_of(update)

    def states(self, state: str, worker: str = "replica") -> list[WeightState]:
        return [e for e in list(self.events) if isinstance(e, WeightState) and (e.worker, e.state) == (worker, state)]

    def until(self, state: str, version: int, worker: str = "replica") -> WeightState:
        reported = lambda: [each for each in self.states(state, worker) if each.version == version]  # noqa: E731
        until(reported, f"version {version} {state} at {worker}")
        return reported()[0]

    def notes(self) -> list[str]:
        return [event.text for event in list(self.events) if isinstance(event, Note)]

    def loaded(self, worker: str = "replica") -> int | None:
        return next(each.loaded for each in self.run.queue.status().sessions if each.name == worker)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(af.AsyncFlowError):
            self._ending.close()
        self.run.close()


def load(updates: TransportSubscriber, version: int) -> float:
    """Load versions up to this one, as an engine that takes all tensors; its value."""
    for update in updates:
        with update:
            value = value_of(update)
        if update.version == version:
            return value
        assert update.version < version
    raise AssertionError(f"the versions ended before {version}")
