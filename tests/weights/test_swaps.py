"""Loading into an engine: proven, or what it had is put back."""

import asyncio
from typing import Any

import pytest
from replica_runs import LIMIT_S, Served, probe_of, replica, served
from scripted_transport import fails, scripted

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, DeadlineExceeded, VersionGone, WeightError, WeightMismatch
from asyncflow_sdk.testing import EchoRollout
from asyncflow_sdk.testing.echo import weights
from asyncflow_sdk.weights import Loading, loading, prefetch


class Loaded:
    """An engine under ``Loading``, step by step."""

    def __init__(self, one: Any, engine: EchoRollout, *verify: str, **options: Any) -> None:
        self.one, self.engine = one, engine
        self.loading = Loading(engine, one.updates, verify, **options)

    async def load(self, version: int) -> bool:
        await self.one.staged(version)
        assert await self.one.updates.permission(version)
        return await self.loading.load(self.one.updates.take())

    @property
    def held(self) -> float:
        """The version whose weights the engine holds; not a number for a mixture."""
        return self.engine._held


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "RETRY_S", 0.01)


def publish(run: Served, version: int, **options: Any) -> None:
    run.publish(version, weights(version), **options)


def test_a_load_that_fails_half_way_puts_back_what_there_was_and_is_tried_again() -> None:
    async def scenario() -> None:
        async with replica(run.client("replica")) as one:
            loaded = Loaded(one, EchoRollout(fail_load_at=2))
            publish(run, 1)
            assert await loaded.load(1)
            publish(run, 2)
            # when
            assert not await loaded.load(2)
            # then
            assert (loaded.held, one.updates.loaded) == (1.0, 1)
            assert await loaded.load(2)
            assert (loaded.held, one.updates.loaded) == (2.0, 2)

    with served() as run:
        asyncio.run(scenario())
        assert [(e.version, e.detail) for e in run.states("failed")] == [
            (2, "EngineError: told to fail while loading version 2")
        ]


def test_without_a_whole_version_to_put_back_a_replica_is_poisoned() -> None:
    async def scenario() -> None:
        async with replica(run.client("replica")) as one:
            # given an engine that fails twice: to load, and to load what it had
            loaded = Loaded(one, EchoRollout(fail_load_at=2, fail_loads=2))
            publish(run, 1)
            assert await loaded.load(1)
            publish(run, 2)
            # when / then
            with pytest.raises(
                WeightError,
                match=r"version 2 could not be loaded \(EngineError: told to fail.*, and neither could version 1 again"
                r" \(EngineError.*must not generate any more",
            ):
                await loaded.load(2)
            assert one.updates.loaded == 1

    with served() as run:
        asyncio.run(scenario())


def test_weights_that_were_never_published_cannot_be_put_back() -> None:
    async def scenario() -> None:
        async with replica(run.client("one"), 0) as one, replica(run.client("two"), 0) as two:
            once, twice = (
                Loaded(each, EchoRollout(fail_load_at=1, fail_loads=n)) for n, each in ((1, one), (2, two))
            )
            publish(run, 1)
            assert await once.load(1)  # at the second try
            with pytest.raises(WeightError, match="neither could version 0 again .EngineError: told to fail"):
                await twice.load(1)

    with served() as run:
        asyncio.run(scenario())


def test_a_replica_that_has_no_version_yet_just_tries_again() -> None:
    async def scenario() -> None:
        async with replica(run.client("replica")) as one:
            loaded = Loaded(one, EchoRollout(fail_load_at=1, fail_loads=2))
            publish(run, 1)
            assert [await loaded.load(1) for _ in range(3)] == [False, False, True]
            assert loaded.held == 1.0

    with served() as run:
        asyncio.run(scenario())


def test_the_version_before_may_be_fetched_again_only_while_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = scripted(monkeypatch)

    async def scenario() -> None:
        async with replica(run.client("replica")) as one:
            loaded = Loaded(one, EchoRollout(fail_load_at=2))
            publish(run, 1)
            assert await loaded.load(1)
            publish(run, 2)
            await one.staged(2)
            receiver.script = [fails(VersionGone("version 1 is no longer kept"))]
            # when it is not, the new one is tried once more
            assert await loaded.load(2)
            assert (loaded.held, one.updates.loaded) == (2.0, 2)
            # and when that is gone, too
            loaded.engine._failing, loaded.engine._fails_left = True, 1
            publish(run, 3)
            await one.staged(3)
            receiver.script = [fails(VersionGone(f"version {n} is no longer kept")) for n in (2, 3)]
            with pytest.raises(
                WeightError, match="neither could version 2 again .VersionGone: version 2 is no longer"
            ):
                await loaded.load(3)

    with served() as run:
        asyncio.run(scenario())
        assert receiver.held == []


def test_names_that_do_not_match_would_come_again_and_are_raised() -> None:
    async def scenario() -> None:
        async with replica(run.client("replica")) as one:
            loaded = Loaded(one, EchoRollout(take_fewer_at=1))
            publish(run, 1)
            with pytest.raises(
                WeightMismatch, match=r"1 of 5 tensors were not taken by the engine: layer\.0\.weight"
            ):
                await loaded.load(1)
            assert one.updates.loaded is None

    with served() as run:
        asyncio.run(scenario())


@pytest.mark.parametrize("verify", ["probe", "held"])
def test_weights_that_were_silently_not_applied_are_found_out(verify: str) -> None:
    """The engine says it took every tensor of version 2, and holds version 1."""

    probes = [{"probe": probe_of(n)} if verify == "probe" else {} for n in range(4)]

    async def scenario() -> None:
        async with replica(run.client("replica")) as one:
            loaded = Loaded(one, EchoRollout(ignore_at=2), verify)
            publish(run, 1, **probes[1])
            assert await loaded.load(1)
            publish(run, 2, **probes[2])
            assert not await loaded.load(2)
            assert one.updates.loaded == 1
            publish(run, 3, **probes[3])
            assert await loaded.load(3)

    with served() as run:
        asyncio.run(scenario())
        (failed,) = run.states("failed")
        assert failed.detail.startswith("WeightError: version 2: ")
        assert ("log-prob -1, the trainer's -2" if verify == "probe" else "the bytes of") in failed.detail


def test_a_probe_is_looked_at_unasked_by_engines_that_can() -> None:
    async def scenario() -> None:
        async with replica(run.client("able")) as one, replica(run.client("not")) as other:
            able, unable = (
                Loaded(one, EchoRollout(ignore_at=1)),
                Loaded(other, EchoRollout(ignore_at=1, proves=False)),
            )
            publish(run, 1, probe=probe_of(1))
            assert not await able.load(1)
            assert await unable.load(1)  # nobody asked it to, and it cannot

    with served() as run:
        asyncio.run(scenario())


def test_a_probe_that_is_asked_for_and_is_not_there() -> None:
    async def scenario() -> None:
        async with replica(run.client("replica")) as one:
            loaded = Loaded(one, EchoRollout(), "probe")
            publish(run, 1)
            with pytest.raises(ConfigError, match="version 1 carries no probe, and verify asks for one"):
                await loaded.load(1)

    with served() as run:
        asyncio.run(scenario())


def test_a_replica_whose_loads_fail_one_after_another_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "GIVE_UP_AFTER", 3)

    async def scenario() -> None:
        async with replica(run.client("replica")) as one:
            loaded = Loaded(one, EchoRollout(ignore_at=1), "held")
            publish(run, 1)
            assert not await loaded.load(1)
            assert not await loaded.load(1)
            with pytest.raises(
                WeightError, match="3 loads failed one after another, the last of version 1: WeightError"
            ):
                await loaded.load(1)

    with served() as run:
        asyncio.run(scenario())


def test_an_engine_that_never_comes_back_from_a_load_is_named() -> None:
    async def scenario() -> None:
        async with replica(run.client("replica"), 0) as one:
            loaded = Loaded(one, EchoRollout(slow_load_s=10 * LIMIT_S), timeout_s=0.05)
            publish(run, 1)
            with pytest.raises(WeightError, match="EchoRollout has not loaded version 1 in 0.05 s"):
                await loaded.load(1)

    with served() as run:
        asyncio.run(scenario())


class Late(EchoRollout):
    """Says itself, at once, that something took too long."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    async def load_weights(self, update: af.WeightUpdate) -> set[str]:
        raise self.error


@pytest.mark.parametrize("error", [TimeoutError("rank 3 did not answer"), DeadlineExceeded("rank 3 did not answer")])
def test_a_timeout_of_the_engines_own_is_told_as_it_is(error: Exception) -> None:
    async def scenario() -> None:
        async with replica(run.client("replica")) as one:
            loaded = Loaded(one, Late(error))
            publish(run, 1)
            assert not await loaded.load(1)

    with served() as run:
        asyncio.run(scenario())
        assert [e.detail for e in run.states("failed")] == [f"{type(error).__name__}: rank 3 did not answer"]


class Old(EchoRollout):
    """Names tensors in its own way, and can do nothing else."""

    def __init__(self) -> None:
        super().__init__(proves=False)
        self._weights = {f"old.{name}": array for name, array in self._weights.items()}

    def weight_name(self, name: str) -> str:
        return f"old.{name}"

    @property
    def _held(self) -> float:
        return float(self._weights["old.scale"])


def test_published_names_become_the_engines() -> None:
    engine = Old()

    async def scenario() -> None:
        async with replica(run.client("replica"), rename=engine.weight_name) as one:
            loaded = Loaded(one, engine)
            publish(run, 1)
            assert await loaded.load(1)
            assert loaded.held == 1.0

    with served() as run:
        asyncio.run(scenario())


@pytest.mark.parametrize(
    ("engine", "options", "reason"),
    [
        (EchoRollout(), {"swap": "in_flight"}, "EchoRollout cannot load weights while requests run.*it can: drain"),
        (
            EchoRollout(),
            {"swap": "partial"},
            "EchoRollout cannot load weights between the parts of a response.*it can: drain",
        ),
        (EchoRollout(), {"swap": "later"}, "swap is one of auto, drain, boundary, partial, in_flight, not 'later'"),
        (EchoRollout(), {"verify": ["hash"]}, "verify is a list of 'probe' and 'held', not"),
        (EchoRollout(), {"verify": "held"}, "verify is a list of"),
        (EchoRollout(proves=False), {"verify": ["held"]}, "EchoRollout does not hold weights as they were published"),
        (EchoRollout(proves=False), {"verify": ["probe"]}, "EchoRollout cannot score given responses"),
        (EchoRollout(in_flight=True), {"swap": "in_flight", "verify": ["probe"]}, "does not go with"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_before_it_starts(engine: Any, options: Any, reason: str) -> None:
    with af.serve() as run, pytest.raises(ConfigError, match=reason):
        af.Producer(run.queue, engine, **options)
