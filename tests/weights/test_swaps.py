"""A producer loads versions into its engine: proven, or the version before is put back."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Set
from typing import Any

import numpy as np
import pytest
from faulty_echo import FaultyRollout
from replicas import LIMIT_S, Served
from scripted_transport import Scripted, fails
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, DeadlineExceeded, EngineError, VersionGone, WeightError, WeightMismatch
from asyncflow_sdk.interfaces import Completion
from asyncflow_sdk.testing import EchoRollout
from asyncflow_sdk.testing.echo import weights
from asyncflow_sdk.types import Probe, VersionSpan
from asyncflow_sdk.types.events import Loaded
from asyncflow_sdk.weights import replica

pytestmark = pytest.mark.fast


def probe_of(steps: float) -> Probe:
    """What the engine ``echo`` passes after so many steps."""
    return Probe(((1, 2), (3,)), ((4, 5), (6,)), ((-steps, -steps), (-steps,)))


class Producing:
    """A producer in a thread of its own, until ``stop`` or its failure. ``make``: makes its engine."""

    def __init__(self, run: Served, make: Callable[[], EchoRollout], name: str = "replica", **options: Any) -> None:
        self._run, self._name, self.error = run, name, None
        self.engine, self._queue, self._options = make(), run.client(name).queue, options
        self._began = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._produce()), daemon=True)
        self._thread.start()
        assert self._began.wait(LIMIT_S)

    async def _produce(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._began.set()
        try:
            await af.EngineProducer(self._queue, self.engine, **self._options).run()
        except (Exception, asyncio.CancelledError) as error:
            self.error: Any = error

    @property
    def held(self) -> float:
        """The version whose weights the engine holds; of the last tensor and of the first."""
        tensors = dict(self.engine.held_weights())
        values = {float(tensors[name].reshape(-1)[0]) for name in ("scale", "layer.0.weight")}
        return values.pop() if len(values) == 1 else float("nan")

    def on(self, version: int) -> None:
        """Wait until it has loaded a version."""
        until(lambda: self._loaded(version) or self.error, f"version {version} at {self._name}")
        assert self.error is None, self.error
        assert self.held == version

    def _loaded(self, version: int) -> bool:
        found = [e for e in list(self._run.events) if isinstance(e, Loaded)]
        return any((each.worker, each.version) == (self._name, version) for each in found)

    def fails(self, error: type[Exception], match: str) -> None:
        """Wait for its end, which is by this error."""
        until(lambda: self.error is not None, "its failure")
        with pytest.raises(error, match=match):
            raise self.error

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)  # type: ignore[union-attr]
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def served(**limits: Any) -> Iterator[Served]:
    """A run with a task to generate for."""
    with Served("scripted", **limits) as run:
        queue = run.run.queue
        queue.declare("train", needs=["response_ids"], batch_rows=4)
        gives = ["response_ids", "logprobs", "version_spans"]
        queue.declare("rollout", needs=["prompt_ids"], gives=gives, admits=True)
        yield run


@pytest.fixture
def run(scripted: type[Scripted]) -> Iterator[Served]:
    with served() as run:
        yield run


def publish(run: Served, version: int, **options: Any) -> None:
    run.publish(version, weights(version), **options)


@pytest.fixture
def producing(run: Served) -> Iterator[Callable[..., Producing]]:
    """Makes producers on version 1; they are stopped in the end."""
    made: list[Producing] = []

    def begin(make: Callable[[], EchoRollout] = EchoRollout, *, at: int | None = 1, **options: Any) -> Producing:
        if at is not None and not made:
            publish(run, at, **({"probe": probe_of(at)} if options.get("verify") == ["probe"] else {}))
        made.append(Producing(run, make, **options))
        if at is not None:
            made[-1].on(at)
        return made[-1]

    yield begin
    for each in made:
        if each.error is None:
            each.stop()


def test_a_load_that_fails_half_way_puts_back_what_there_was_and_comes_again(
    run: Served, producing: Callable[..., Producing]
) -> None:
    producer = producing(lambda: FaultyRollout(fail_load_at=2))
    publish(run, 2)
    assert run.until("failed", 2).detail == "EngineError: told to fail while loading version 2"
    producer.on(2)


def test_without_a_whole_version_to_put_back_a_replica_is_poisoned(
    run: Served, producing: Callable[..., Producing]
) -> None:
    # given an engine that fails twice: to load, and to load what it had
    producer = producing(lambda: FaultyRollout(fail_load_at=2, fail_loads=2))
    publish(run, 2)
    producer.fails(
        WeightError,
        r"version 2 could not be loaded \(EngineError: told to fail.*, and neither could version 1 again"
        r" \(EngineError.*must not generate any more",
    )


def test_a_replica_that_has_no_version_yet_just_tries_again(run: Served, producing: Callable[..., Producing]) -> None:
    producing(lambda: FaultyRollout(fail_load_at=1))


@pytest.mark.parametrize("gone", [[1], [1, 2]], ids=["the old one", "both"])
def test_the_version_before_is_put_back_only_while_it_is_kept(
    gone: list[int], run: Served, scripted: type[Scripted], producing: Callable[..., Producing]
) -> None:
    producer = producing(lambda: FaultyRollout(fail_load_at=2))
    failing = [fails(VersionGone(f"version {n} is no longer kept")) for n in gone]
    scripted.end.script = [lambda receiver, manifest: None, *failing]  # the first fetch is that of version 2
    publish(run, 2)
    if len(gone) == 1:
        producer.on(2)  # the new one is tried once more
    else:
        producer.fails(WeightError, "neither could version 1 again .VersionGone: version 1 is no longer")
        assert scripted.end.held == []


def test_names_that_do_not_match_would_come_again_and_are_raised(
    run: Served, producing: Callable[..., Producing]
) -> None:
    producer = producing(lambda: FaultyRollout(take_fewer_at=2))
    publish(run, 2)
    producer.fails(WeightMismatch, r"1 of 5 tensors were not taken by the engine: layer\.0\.weight")


def test_weights_of_another_dtype_are_refused_by_name(run: Served, producing: Callable[..., Producing]) -> None:
    producer = producing(at=None)
    with run.trainer("other", dtype="bfloat16") as trainer:
        trainer.publish(1, weights(1)).wait(LIMIT_S)
        producer.fails(WeightMismatch, r"version 1: tensor 'layer\.0\.weight' is bfloat16.*has float32")


@pytest.mark.parametrize("verify", ["probe", "held"])
def test_weights_that_were_silently_not_applied_are_found_out(
    verify: str, run: Served, producing: Callable[..., Producing]
) -> None:
    """The engine says it took every tensor of version 2, and holds version 1."""
    producer = producing(lambda: FaultyRollout(ignore_at=2), verify=[verify])
    publish(run, 2, **({"probe": probe_of(2)} if verify == "probe" else {}))
    detail = run.until("failed", 2).detail
    assert detail.startswith("WeightError: version 2: ")
    assert ("log-prob -1, the trainer's -2" if verify == "probe" else "the bytes of") in detail
    publish(run, 3, **({"probe": probe_of(3)} if verify == "probe" else {}))
    producer.on(3)


def test_a_probe_is_looked_at_unasked_by_engines_that_can(run: Served, producing: Callable[..., Producing]) -> None:
    run.transport = "shm"  # of "scripted" all replicas would share one receiver
    producing(lambda: FaultyRollout(ignore_at=2), name="able")
    producing(lambda: FaultyRollout(ignore_at=2, proves=False), name="unable")
    publish(run, 2, probe=probe_of(2))
    run.until("failed", 2, "able")
    until(lambda: run.loaded("unable") == 2, "version 2, which nobody can prove there")


def test_a_probe_that_is_asked_for_and_is_not_there(run: Served, producing: Callable[..., Producing]) -> None:
    producer = producing(at=None, verify=["probe"])
    publish(run, 1)
    producer.fails(ConfigError, "version 1 carries no probe, and verify asks for one")


def test_a_replica_whose_loads_fail_one_after_another_ends(
    run: Served, producing: Callable[..., Producing], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "GIVE_UP_AFTER", 2)
    producer = producing(lambda: FaultyRollout(ignore_at=2), verify=["held"])
    publish(run, 2)
    producer.fails(WeightError, "2 loads failed one after another, the last of version 2: WeightError")


def test_failed_loads_count_only_one_after_another(
    run: Served, producing: Callable[..., Producing], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "GIVE_UP_AFTER", 2)

    class FailsNowAndThen(EchoRollout):
        async def load_weights(self, update: af.WeightUpdate) -> Set[str]:
            if update.version in failing:
                failing.remove(update.version)
                raise EngineError(f"version {update.version} would not load")
            return await super().load_weights(update)

    failing = [2, 3, 4]
    producer = producing(FailsNowAndThen)
    for version in (2, 3, 4):
        publish(run, version)
        producer.on(version)
    assert failing == []


class Hasty(EchoRollout):
    """Ends all requests while it loads version 2 for the first time, with tokens of its weights; then the load fails."""

    def __init__(self) -> None:
        super().__init__(in_flight=True)
        self.begun = self.ended = 0
        self._unproven = asyncio.Event()

    async def generate(self, request: Any) -> AsyncIterator[Completion]:
        self.begun += 1
        if self._unproven.is_set():
            async for completion in super().generate(request):
                yield completion
            return
        await self._unproven.wait()
        ids = request.prompt_ids
        yield Completion(0, ids, np.full(len(ids), -99.0, np.float32), "stop", (VersionSpan(2, 0, len(ids)),))
        self.ended += 1

    async def load_weights(self, update: af.WeightUpdate) -> Set[str]:
        if update.version < 2 or self._unproven.is_set():
            return await super().load_weights(update)
        self._unproven.set()
        while self.ended < self.begun:
            await asyncio.sleep(0)
        raise EngineError("half of it came")


def test_what_unproven_weights_have_generated_is_generated_again(
    run: Served, producing: Callable[..., Producing]
) -> None:
    producer, queue = producing(Hasty, swap="in_flight"), run.run.queue
    engine: Any = producer.engine
    queue.declare("look", needs=["logprobs"])
    queue.put({"prompt_ids": [[1, 2]] * 4})
    until(lambda: engine.begun == 4, "the requests")
    publish(run, 2)
    producer.on(2)
    looked = queue.get("look", 4, timeout_s=LIMIT_S)
    assert engine.begun == 8
    assert {tuple(row) for row in looked["logprobs"]} <= {(-1.0, -1.0), (-2.0, -2.0)}


class Odd(EchoRollout):
    """``raises``: from version 2 on; else the load of version 2 has no end."""

    def __init__(self, raises: Exception | None = None) -> None:
        super().__init__()
        self.raises, self.loading = raises, threading.Event()

    async def load_weights(self, update: af.WeightUpdate) -> Set[str]:
        if update.version == 2:
            self.loading.set()
            if self.raises is not None:
                raise self.raises
            await asyncio.sleep(10 * LIMIT_S)
        return await super().load_weights(update)


class Unclosable(Odd):
    async def close(self) -> None:
        raise EngineError("cannot be closed")


@pytest.mark.parametrize("error", [TimeoutError("rank 3 did not answer"), DeadlineExceeded("rank 3 did not answer")])
def test_a_timeout_of_the_engines_own_is_reported_as_it_is(
    error: Exception, run: Served, producing: Callable[..., Producing]
) -> None:
    producer = producing(lambda: Odd(error))
    publish(run, 2)
    assert run.until("failed", 2).detail == f"{type(error).__name__}: rank 3 did not answer"
    publish(run, 3)
    producer.on(3)


@pytest.mark.parametrize("engine", [Odd, Unclosable])
def test_a_producer_that_is_cancelled_while_it_loads_keeps_nobody_waiting(
    engine: type[Odd], scripted: type[Scripted]
) -> None:
    with served(max_swapping=1) as run:
        publish(run, 1)
        producer = Producing(run, engine)
        producer.on(1)
        publish(run, 2)
        assert producer.engine.loading.wait(LIMIT_S)  # type: ignore[attr-defined]
        # when, in a process that lives on
        producer.stop()
        # then
        assert next(iter(run.replica("other"))).version == 2
        assert run.loaded() is None


class Renaming(EchoRollout):
    """Names tensors in its own way."""

    def weight_name(self, name: str) -> str:
        return f"old.{name}"

    async def load_weights(self, update: af.WeightUpdate) -> Set[str]:
        self.taken = {name: float(array.sum()) for name, array in update.arrays()}
        return set(self.taken)


def test_published_names_become_the_engines(run: Served, producing: Callable[..., Producing]) -> None:
    producer = producing(lambda: Renaming(proves=False), at=None)
    publish(run, 1)
    until(lambda: run.loaded() == 1, "version 1")
    assert producer.engine.taken.keys() == {f"old.{name}" for name in weights(1)}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("engine", "options", "reason"),
    [
        (EchoRollout(), {"swap": "in_flight"}, "EchoRollout cannot load weights while requests run.*it can: drain"),
        (
            EchoRollout(),
            {"swap": "partial"},
            "EchoRollout cannot load weights between the parts of a response.*it can: drain",
        ),
        (EchoRollout(), {"swap": "later"}, "swap must be 'auto' or .* or 'in_flight', not str: 'later'"),
        (EchoRollout(), {"verify": ["hash"]}, "verify must be a list of 'probe' or 'held', not"),
        (EchoRollout(), {"verify": "held"}, "verify must be a list of"),
        (EchoRollout(proves=False), {"verify": ["held"]}, "EchoRollout does not hold weights as they were published"),
        (EchoRollout(proves=False), {"verify": ["probe"]}, "EchoRollout cannot score given responses"),
        (EchoRollout(in_flight=True), {"swap": "in_flight", "verify": ["probe"]}, "does not go with"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_before_it_starts(engine: Any, options: Any, reason: str) -> None:
    with af.serve() as run, pytest.raises(ConfigError, match=reason):
        af.EngineProducer(run.queue, engine, **options)
