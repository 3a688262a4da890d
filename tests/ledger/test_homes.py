"""Homes of payload: late, lost and back, and what becomes of the rows whose columns were there."""

from __future__ import annotations

from typing import Any

import pytest
from checked_ledger import SERVER, Place
from ledger_queue import LAST, PLAIN, REWARD, ROLLOUT, TEXT, TOKENS, TRAIN, Queue, ids

from asyncflow_sdk.errors import ConfigError, DeadlineExceeded, Ended, LeaseLost, PayloadLost
from asyncflow_sdk.interfaces.store import HomeOffer
from asyncflow_sdk.ledger import TaskSpec
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.types import events as ev

pytestmark = pytest.mark.fast

AWAY: Place = (1, 1)


class Hosts(Queue):
    """A queue with a home. Puts are in ``puts``, and what tasks make is in ``made``."""

    def __init__(self, *tasks: TaskSpec, **more: Any) -> None:
        self.puts, self.made = SERVER, SERVER
        super().__init__(*tasks, **more)
        self.unit = self.join("unit a")
        assert self.open_home("a") == cmd.HomeOpened(home=1, epoch=1)
        self.made = AWAY

    def place_of_write(self, command: Any) -> Place:
        return self.puts if isinstance(command, cmd.AddRows) else self.made

    def open_home(self, identity: str, name: str = "a", unit: int | None = None, **more: Any) -> Any:
        home = cmd.OpenHome(offer=HomeOffer(store="hosts", name=name, identity=identity, **more))
        return self.do(self.unit if unit is None else unit, home)

    def evict(self, home: int = 1, epoch: int = 1, reason: str = "it burns") -> ev.HomeLost:
        """Evict a home, and return the event."""
        self.do(self.admin, cmd.EvictHome(home=home, epoch=epoch, reason=reason))
        (event,) = [each for each in self.events if isinstance(each, ev.HomeLost) and each.epoch == epoch]
        return event


def trained(**limits: Any) -> tuple[Hosts, int]:
    """A run with a home, and a worker that has version 0 loaded."""
    queue = Hosts(ROLLOUT, REWARD, TRAIN, **limits)
    worker = queue.join("worker")
    queue.publish(0)
    queue.load(worker, 0)
    return queue, worker


def generate(queue: Hosts, worker: int, count: int = 100) -> None:
    queue.complete(worker, queue.lease(worker, "rollout", count))


def score(queue: Hosts, worker: int, count: int = 100) -> None:
    queue.complete(worker, queue.lease(worker, "reward", count))


def fill(queue: Hosts, worker: int, steps: int, **put: Any) -> None:
    for _ in range(steps):
        queue.put(2, 2, **put)
        generate(queue, worker)
        score(queue, worker)


def wanted(queue: Hosts, prefix: str) -> Any:
    return queue.do(queue.admin, cmd.AwaitRowsWanted(prefix=prefix))


# ---- homes and epochs


def test_a_unit_that_dies_is_late_and_its_home_keeps_the_epoch() -> None:
    # given a home whose unit has died
    queue = Hosts(PLAIN, home_silence_s=20.0)
    queue.die(queue.unit)
    queue.at(19.0)
    (home,) = queue.do(queue.admin, cmd.GetHomes()).homes
    assert (home.unit, home.absent_since, home.expires, home.lost) == (-1, 0.0, 20.0, "")
    # when another unit serves the same contents, at another address
    again = queue.open_home("a", unit=queue.join("unit a"), address="tcp://b:2")
    # then it is the same epoch, and nobody gives it up any more
    assert again == cmd.HomeOpened(home=1, epoch=1)
    queue.at(100.0)
    (home,) = queue.do(queue.admin, cmd.GetHomes()).homes
    assert (home.offer.address, home.unit, home.lost) == ("tcp://b:2", queue.homes[1].unit, "")


def test_a_home_that_is_silent_for_too_long_is_lost_for_ever() -> None:
    # given
    queue = Hosts(PLAIN, home_silence_s=20.0)
    queue.die(queue.unit)
    assert queue.next_deadline() == 20.0
    # when
    queue.at(20.0)
    # then
    (event,) = [each for each in queue.events if isinstance(each, ev.HomeLost)]
    assert (event.home, event.epoch, event.name, event.reason) == (1, 1, "a", "silent for 20 s")
    assert not queue.ledgers[0].state.homes.is_live(1, 1)
    # when its unit comes back with the same contents
    again = queue.open_home("a", unit=queue.join("unit a"))
    # then a new epoch begins, and the old one stays lost
    assert again == cmd.HomeOpened(home=1, epoch=2)
    homes = queue.ledgers[0].state.homes
    assert [homes.is_live(1, epoch) for epoch in (0, 1, 2, 3)] == [False, False, True, False]


def test_the_limit_of_silence_holds_for_homes_that_are_silent_already() -> None:
    queue = Hosts(PLAIN, home_silence_s=20.0)
    queue.die(queue.unit)
    queue.do(queue.admin, cmd.Configure(home_silence_s=50.0))
    queue.at(49.0)
    assert queue.do(queue.admin, cmd.GetHomes()).homes[0].lost == ""
    queue.do(queue.admin, cmd.Configure(home_silence_s=10.0))
    queue.at(49.0)
    assert queue.do(queue.admin, cmd.GetHomes()).homes[0].lost == "silent for 49 s"


def test_a_home_with_other_contents_loses_the_old_ones_at_once() -> None:
    queue = Hosts(PLAIN)
    queue.die(queue.unit)
    assert queue.open_home("a, booted again", unit=queue.join("unit a")) == cmd.HomeOpened(home=1, epoch=2)
    (event,) = [each for each in queue.events if isinstance(each, ev.HomeLost)]
    assert (event.epoch, event.reason) == (1, "its contents are gone: it was opened with others")


def test_two_hosts_of_one_name_do_not_take_each_others_home() -> None:
    queue = Hosts(PLAIN)
    other = queue.join("unit of another host")
    served = r"home 1 \(a\) has other contents, served by unit a \(session 2\): rename this one; if it replaces"
    with pytest.raises(ConfigError, match=served):
        queue.open_home("b", unit=other)
    assert queue.open_home("b", name="b", unit=other) == cmd.HomeOpened(home=2, epoch=1)
    with pytest.raises(ConfigError, match="a unit serves one home"):
        queue.open_home("c", name="c", unit=other)


def test_the_newest_unit_of_a_home_serves_it() -> None:
    # given a home with a second unit, since the first one hangs
    queue = Hosts(PLAIN, home_silence_s=0.0)
    queue.open_home("a", unit=queue.join("unit a"))
    # when the first one dies
    queue.die(queue.unit)
    queue.at(1.0)
    # then nothing is lost
    assert queue.ledgers[0].state.homes.is_live(1, 1)


@pytest.mark.parametrize(
    ("home", "epoch", "message"),
    [
        (0, 0, "home 0 is the memory of the queue server"),
        (7, 1, r"home 7 was never opened; opened are: home 1 \(a\)"),
        (1, 0, r"epoch 0 of home 1 \(a\) cannot be evicted: the newest epoch is 1, which is lost: evicted by admin"),
        (1, 1, r"epoch 1 of home 1 \(a\) cannot be evicted: the newest epoch is 1, which is lost: evicted by admin"),
    ],
)
def test_what_cannot_be_evicted_is_refused(home: int, epoch: int, message: str) -> None:
    queue = Hosts(PLAIN)
    queue.evict()
    with pytest.raises(ConfigError, match=message):
        queue.do(queue.admin, cmd.EvictHome(home=home, epoch=epoch))


@pytest.mark.parametrize("lacks", ["store", "name", "identity"])
def test_a_home_has_a_store_a_name_and_an_identity(lacks: str) -> None:
    queue = Hosts(PLAIN)
    named = {"store": "hosts", "name": "b", "identity": "b"} | {lacks: ""}
    with pytest.raises(ConfigError, match="a home needs"):
        queue.do(queue.admin, cmd.OpenHome(offer=HomeOffer(**named)))


# ---- rows


def test_rows_whose_put_was_in_a_lost_home_fail_and_can_be_put_again() -> None:
    # given rows of a put in the home, and rows in the server's memory
    queue = Hosts(PLAIN, LAST)
    queue.puts = AWAY
    queue.put(2, key="away")
    queue.puts = SERVER
    queue.put(2, key="here")
    # when the home is lost
    event = queue.evict()
    # then the former fail, and are named
    assert event.rows_failed == 2
    (letter,) = queue.do(queue.admin, cmd.GetFailed()).groups
    assert (letter.first, letter.rows, letter.key) == (0, 2, "away")
    assert letter.reasons == ("payload lost: home a was lost, evicted by admin: it burns",)
    assert sorted(queue.live) == [2, 3]
    # and the same put brings them again
    assert queue.put(2, key="away").count == 2
    assert queue.put(2, key="here").again


def test_a_group_that_lost_what_was_made_of_it_fails_and_is_wanted_again() -> None:
    # given a group whose responses are in the home, and its prompt is not
    queue, worker = trained(max_staleness=1)
    queue.put(2, 2, key="k-7")
    generate(queue, worker)
    queue.publish(1)
    queue.load(worker, 1)
    held = queue.lease(worker, "reward", 1)
    # when the home is lost
    event = queue.evict()
    # then it fails, and a feeder hears which of its puts to repeat
    assert event.rows_failed == 4
    with pytest.raises(LeaseLost):
        queue.complete(worker, held)
    assert wanted(queue, "k-").lost == {"k-7": 2}
    assert wanted(queue, "other-").lost == wanted(queue, "").lost == {}
    # and what it puts again is admitted by the staleness rule anew
    queue.made = SERVER
    assert queue.put(2, 2, key="k-7").count == 4
    generate(queue, worker)
    assert {row.version for row in queue.live.values()} == {1}
    score(queue, worker)
    assert ids(queue.lease(worker, "train", 1)) == [4, 5, 6, 7]
    assert wanted(queue, "k-").lost == {}


def test_a_column_that_nobody_needs_any_more_costs_nothing() -> None:
    # given rows with an answer in the home, which only a task that is through with them needed
    score = TaskSpec(name="score", needs=("answer",), gives=("number",), lease_s=10)
    queue = Hosts(PLAIN, score, TaskSpec(name="end", needs=("number",), lease_s=10))
    queue.put(2)
    queue.complete(queue.admin, queue.lease(queue.admin, "plain"))
    queue.made = SERVER
    queue.complete(queue.admin, queue.lease(queue.admin, "score"))
    # when the home is lost
    event = queue.evict()
    # then nothing happens, until a task is declared that needs it
    assert (event.rows_failed, sorted(queue.live)) == (0, [0, 1])
    queue.do(queue.admin, cmd.Declare(task=TaskSpec(name="late", needs=("answer",), lease_s=10)))
    assert (queue.audit().failed, queue.audit().live) == (2, 0)


def test_homes_that_are_lost_at_once_fail_a_row_once() -> None:
    # given prompts in one home, and responses in another
    queue, worker = trained(home_silence_s=20.0)
    queue.puts, queue.made = AWAY, (2, 1)
    other = queue.join("unit b")
    queue.open_home("b", name="b", unit=other)
    queue.put(1, 2)
    generate(queue, worker)
    # when both are silent for too long at the same time
    queue.die(queue.unit)
    queue.die(other)
    queue.at(30.0)
    # then
    assert (queue.audit().failed, queue.audit().put, queue.audit().live) == (2, 2, 0)
    events = [each for each in queue.events if isinstance(each, ev.HomeLost)]
    assert [(each.home, each.rows_failed) for each in events] == [(1, 0), (2, 2)]


def test_a_put_that_waits_with_its_payload_in_a_lost_home_is_refused() -> None:
    queue = Hosts(PLAIN, capacity_rows=1)
    queue.put(1)
    queue.puts = AWAY
    ticket = queue.ask(queue.admin, cmd.AddRows(groups=1, group_size=1, columns={"prompt": TEXT}, timeout_s=9.0))
    queue.evict()
    assert isinstance(queue.answers[ticket], PayloadLost)


# ---- steps


def test_a_full_step_with_lost_rows_is_filled_again() -> None:
    # given two full steps, of which the first is leased
    queue, worker = trained(max_staleness=2)
    fill(queue, worker, 1, key="k-0")
    queue.made = SERVER
    fill(queue, worker, 1, key="k-1")
    step = queue.lease(worker, "train", 1)
    assert (step.step, ids(step)) == (0, [0, 1, 2, 3])
    # when its rows are lost
    assert queue.evict().rows_failed == 4
    # then its lease ends, the next rows come first, and what is put again fills the second step
    with pytest.raises(LeaseLost):
        queue.complete(worker, step)
    step = queue.lease(worker, "train", 1)
    assert (step.step, ids(step)) == (0, [4, 5, 6, 7])
    queue.complete(worker, step)
    queue.publish(1)
    queue.load(worker, 1)
    fill(queue, worker, 1, key="k-0")
    step = queue.lease(worker, "train", 1)
    assert (step.step, ids(step)) == (1, [8, 9, 10, 11])


def test_a_step_that_was_overtaken_is_put_again_for_later_steps() -> None:
    # given two leased steps, of which the later is acknowledged, and one response of the earlier in the home
    queue, worker = trained(max_staleness=2)
    queue.put(2, 2, key="k-0")
    generate(queue, worker, 2)
    queue.made = SERVER
    generate(queue, worker, 2)
    score(queue, worker)
    fill(queue, worker, 1)
    first, second = (queue.lease(worker, "train", 1) for _ in range(2))
    queue.complete(worker, second)
    # when it is lost
    event = queue.evict()
    # then the whole step ends, and both of its groups are wanted again
    assert event.rows_failed == 4
    with pytest.raises(LeaseLost):
        queue.complete(worker, first)
    assert wanted(queue, "k-").lost == {"k-0": 2}
    assert queue.put(2, 2, key="k-0").count == 4
    assert queue.status().step == 2


def test_a_part_of_a_step_with_a_lost_row_is_void() -> None:
    # given a step that is leased in parts
    queue, worker = trained()
    queue.put(1, 2)
    generate(queue, worker)
    score(queue, worker)
    delivered = queue.lease(worker, "train", 1, parts=True)
    assert ids(delivered) == [0, 1]
    # when a row of a delivered part is lost
    queue.evict()
    # then the lease ends, with the reason
    with pytest.raises(LeaseLost, match=r"rows 0, 1 of its step ended \(failed\): payload lost: home a was lost"):
        queue.lease(worker, "train", 1, parts=True, token=delivered.token)


def test_trained_rows_are_not_put_again() -> None:
    # given a trained step, which another task has still to read
    queue, worker = trained()
    queue.do(queue.admin, cmd.Declare(task=TaskSpec(name="log", needs=("reward",), lease_s=10)))
    fill(queue, worker, 1, key="k")
    queue.complete(worker, queue.lease(worker, "train", 1))
    # when its payload is lost
    event = queue.evict()
    # then its rows fail, and the same put does not bring them again
    assert (event.rows_failed, queue.audit().live) == (4, 0)
    assert queue.put(2, 2, key="k").again


def test_a_group_with_a_trained_row_is_not_put_again() -> None:
    # given a step of two groups, of which one row is trained, which another task has still to read
    queue, worker = trained()
    queue.do(queue.admin, cmd.Declare(task=TaskSpec(name="log", needs=("reward",), lease_s=10)))
    fill(queue, worker, 1, key="k-0")
    queue.complete(worker, queue.lease(worker, "train", 1), 0)
    # when the payload of all is lost
    event = queue.evict()
    # then all fail, and the same put brings only the other group
    assert event.rows_failed == 4
    assert queue.put(2, 2, key="k-0").count == 2
    assert {row.origin for row in queue.live.values()} == {("k-0", 1)}


def test_a_trained_step_is_put_again_if_it_is_trained_again() -> None:
    # given a trained step that no checkpoint covers, and which another task has still to read
    queue, worker = trained(checkpoints=True)
    queue.do(queue.admin, cmd.Declare(task=TaskSpec(name="log", needs=("reward",), lease_s=10)))
    fill(queue, worker, 1, key="k-0")
    held = queue.lease(worker, "log", 2)
    queue.complete(worker, queue.lease(worker, "train", 1))
    # when its payload is lost
    event = queue.evict()
    # then its rows stay, and the other task skips them
    assert (event.rows_failed, len(queue.live), wanted(queue, "k-").lost) == (0, 4, {})
    with pytest.raises(LeaseLost):
        queue.complete(worker, held)
    assert queue.status().rows["log"]["done"] == 4
    assert queue.audit().reasons == {"skipped: payload lost: home a was lost, evicted by admin: it burns": 4}
    # when the trainer begins anew
    queue.do(queue.admin, cmd.Resume(step=0))
    # then they fail, and are wanted again
    assert queue.audit().failed == 4
    assert wanted(queue, "k-").lost == {"k-0": 2}
    assert queue.put(2, 2, key="k-0").count == 4


def test_a_trained_step_that_a_checkpoint_covers_needs_no_payload() -> None:
    queue, worker = trained(checkpoints=True)
    fill(queue, worker, 1)
    queue.complete(worker, queue.lease(worker, "train", 1))
    queue.evict()
    queue.do(queue.admin, cmd.AddCheckpoint(step=1, covers=1))
    assert (queue.audit().consumed, queue.audit().live) == (4, 0)


def test_rows_in_steps_that_nobody_wants_any_more_are_not_put_again() -> None:
    # given the last two steps, of which the later is acknowledged, and a feeder that waits
    queue, worker = trained(max_staleness=2, steps=2)
    fill(queue, worker, 1, key="k-0")
    queue.made = SERVER
    queue.put(2, 2, key="k-1")
    ticket = feeder(queue)
    generate(queue, worker)
    score(queue, worker)
    _, second = (queue.lease(worker, "train", 1) for _ in range(2))
    queue.complete(worker, second)
    # when the earlier is lost
    event = queue.evict()
    # then no step is left for them
    assert (event.rows_failed, queue.audit().live) == (4, 0)
    assert queue.status().over
    assert isinstance(queue.answers[ticket], Ended)


def feeder(queue: Hosts, prefix: str = "k-", session: int = 0, **more: Any) -> int:
    """Ask as a feeder does. Return the ticket."""
    return queue.ask(session or queue.admin, cmd.AwaitRowsWanted(prefix=prefix, timeout_s=60.0, **more))


@pytest.mark.parametrize("steps", [1, 5])
def test_the_last_step_is_filled_again_by_its_feeder_and_the_waiting_workers(steps: int) -> None:
    # given a full step, the last one or the one with the last prompts; workers and the feeder wait
    queue, worker = trained(steps=steps)
    queue.put(2, 2, key="k-0")
    asked = feeder(queue, more=steps == 1)
    generate(queue, worker)
    score(queue, worker)
    waiting = queue.ask(worker, cmd.LeaseRows(task="rollout", count=4, timeout_s=60.0))
    assert not {waiting, asked} & queue.answers.keys()
    # when it is lost
    queue.evict()
    # then the feeder learns what to put again, and a waiting worker gets it
    assert queue.answers[asked] == cmd.RowsWanted(count=0, lost={"k-0": 2})
    queue.made = SERVER
    queue.put(2, 2, key="k-0")
    asked = feeder(queue, more=steps == 1)
    queue.complete(worker, queue.answers[waiting])
    score(queue, worker)
    # and all of it ends once the step is trained
    waiting = queue.ask(worker, cmd.LeaseRows(task="rollout", count=4, timeout_s=60.0))
    assert not {waiting, asked} & queue.answers.keys()
    queue.complete(worker, queue.lease(worker, "train", 1))
    if steps == 1:
        assert isinstance(queue.answers[asked], Ended)
    else:
        assert queue.answers[asked] == cmd.RowsWanted(count=0)
        queue.do(queue.admin, cmd.End())
    assert isinstance(queue.answers[waiting], Ended)
    assert (queue.audit().consumed, queue.audit().live) == (4, 0)


def test_a_feeder_whose_last_prompts_were_lost_before_it_asked_puts_them_again() -> None:
    queue, worker = trained(steps=5)
    fill(queue, worker, 1, key="k-0")
    queue.evict()
    assert queue.answers[feeder(queue, more=False)] == cmd.RowsWanted(count=0, lost={"k-0": 2})
    assert queue.put(2, 2, key="k-0").count == 4


def test_a_feeder_without_more_prompts_does_not_end_before_the_first_host_comes() -> None:
    # given a run that expects homes, and has none yet
    queue = Queue(ROLLOUT, REWARD, TRAIN, home_silence_s=20.0)
    queue.put(2, 2, key="k-0")
    # when its feeder has put all prompts, then it waits for what may be lost
    assert feeder(queue, more=False) not in queue.answers


def test_an_overtaken_step_is_put_again_after_the_last_prompt() -> None:
    # given two leased steps with the last prompts, of which the later is acknowledged
    queue, worker = trained(max_staleness=2)
    fill(queue, worker, 1, key="k-0")
    queue.made = SERVER
    fill(queue, worker, 1, key="k-1")
    asked = feeder(queue, more=False)
    first, second = (queue.lease(worker, "train", 1) for _ in range(2))
    queue.complete(worker, second)
    # when the earlier is lost
    queue.evict()
    with pytest.raises(LeaseLost):
        queue.complete(worker, first)
    # then its prompts fill another step
    assert queue.answers[asked].lost == {"k-0": 2}
    fill(queue, worker, 1, key="k-0")
    asked = feeder(queue, more=False)
    queue.complete(worker, queue.lease(worker, "train", 1))
    assert queue.answers[asked] == cmd.RowsWanted(count=0)
    assert queue.audit().consumed == 8


def test_rows_too_few_for_a_step_or_a_batch_do_not_keep_the_feeder_from_its_end() -> None:
    # given a full step and half of another one, of which a stage waits for more rows than there are
    queue, worker = trained()
    fill(queue, worker, 1, key="k-0")
    queue.put(1, 2, key="k-2")
    generate(queue, worker)
    waiting = queue.ask(worker, cmd.LeaseRows(task="reward", count=4, at_least=4, timeout_s=60.0))
    # when the feeder has no more prompts
    asked = feeder(queue, more=False)
    # then the stage gets the rest, and the end comes with the last whole step
    queue.complete(worker, queue.answers[waiting])
    assert asked not in queue.answers
    queue.complete(worker, queue.lease(worker, "train", 1))
    assert queue.answers[asked] == cmd.RowsWanted(count=0)
    queue.do(queue.admin, cmd.End())
    assert (queue.audit().consumed, queue.audit().cancelled) == (4, 2)


def test_a_feeder_without_more_prompts_ends_no_request_for_other_rows() -> None:
    # given a feeder that waits, a step that may be lost, and tasks that take other partitions, too
    queue, worker = trained()
    scores = TaskSpec(name="scores", needs=("reward",), lease_s=10, partitions=("evaluation",))
    queue.do(queue.admin, cmd.Declare(task=scores))
    fill(queue, worker, 1, key="k-0")
    put = cmd.AddRows(groups=1, group_size=2, columns={"reward": TOKENS}, partition="evaluation")
    feeder(queue, more=False)
    with pytest.raises(DeadlineExceeded):
        queue.lease(worker, "scores")
    with pytest.raises(DeadlineExceeded):
        queue.lease(worker, "rollout")
    # then rows of those come as ever, and none before there are enough
    assert queue.do(queue.admin, put).count == 2
    with pytest.raises(DeadlineExceeded):
        queue.lease(worker, "scores", at_least=4)
    assert ids(queue.lease(worker, "scores", at_least=2)) == [4, 5]


@pytest.mark.parametrize("fed", [True, False])
def test_the_last_full_step_ends_a_loop_of_puts_and_without_a_feeder_the_stream(fed: bool) -> None:
    queue, worker = trained(steps=1)
    queue.put(2, 2, key="k-0")
    there = feeder(queue) if fed else None
    generate(queue, worker)
    score(queue, worker)
    with pytest.raises(Ended):
        queue.do(queue.admin, cmd.AwaitRowsWanted(timeout_s=60.0))
    with pytest.raises(Ended):
        queue.put(2, 2, key="k-1")
    assert queue.status().over is not fed
    # when the feeder is gone, nobody would put lost rows again
    if there is not None:
        queue.forget(there)
    assert queue.status().over


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_loss_after_the_end_makes_fewer_steps_and_says_so(checkpoints: bool) -> None:
    """The rows of the last step are lost in memory of the server, or the trainer resumes after all was trained."""
    queue, worker = trained(steps=2, max_staleness=1, checkpoints=checkpoints)
    queue.made = SERVER
    fill(queue, worker, 1, key="k-0")
    queue.made = AWAY
    fill(queue, worker, 1, key="k-1")
    assert queue.status().over
    if checkpoints:
        for version in (1, 2):
            queue.complete(worker, queue.lease(worker, "train", 1))
            queue.publish(version)
    queue.evict()
    if checkpoints:
        again = queue.do(queue.admin, cmd.Resume(step=0))
        queue.publish(again.version)
    # then what is left is trained, and nobody waits for more
    (note,) = [each.text for each in queue.events if isinstance(each, ev.Note) and "fewer steps" in each.text]
    assert note.endswith("rows for steps were lost, and no more come: training ends with fewer steps")
    queue.complete(worker, queue.lease(worker, "train", 1))
    for task in ("train", "rollout"):
        with pytest.raises(Ended):
            queue.lease(worker, task, 4)
    assert queue.audit().failed == 4


def test_each_feeder_puts_its_own_lost_prompts_again() -> None:
    # given feeders with prefixes alike, and a key that none of them would write
    queue, worker = trained(steps=3)
    queue.put(1, 2, key="k-b-0-7")
    queue.put(1, 2, key="k-03")
    generate(queue, worker)
    queue.made = SERVER
    fill(queue, worker, 1, key="k-3")
    tickets = {prefix: feeder(queue, prefix, more=False) for prefix in ("k-", "k-b-", "k-b-0-")}
    # when prompts of one of them are lost
    queue.evict()
    # then it alone is asked to put again
    assert {prefix for prefix, ticket in tickets.items() if ticket in queue.answers} == {"k-b-0-"}
    assert queue.answers[tickets["k-b-0-"]].lost == {"k-b-0-7": 1}
    # and none takes the put of another for its own
    assert queue.do(queue.admin, cmd.GetPut(prefix="k-b-")) == cmd.LastPut()
    assert queue.do(queue.admin, cmd.GetPut(prefix="k-")).key == "k-3"


def test_a_trainer_without_rows_is_told_that_some_were_lost() -> None:
    queue, worker = trained(steps=5)
    fill(queue, worker, 1)
    queue.evict()
    with pytest.raises(DeadlineExceeded, match="4 rows were lost with their hosts: put them again with their keys"):
        queue.lease(worker, "train", 1)


def test_a_stream_that_a_client_ended_stays_ended() -> None:
    queue, worker = trained(steps=3)
    fill(queue, worker, 1, key="k-0")
    queue.do(queue.admin, cmd.End())
    queue.evict()
    with pytest.raises(Ended):
        queue.put(2, 2, key="k-0")
    with pytest.raises(Ended):
        wanted(queue, "k-")


def test_a_replay_loses_the_same_rows() -> None:
    """The twin gets the same inputs; here its rows move in memory at other times."""
    queue = Hosts(PLAIN, LAST, options={"initial_rows": 4})
    for epoch in range(1, 30):
        queue.made = (1, epoch)
        queue.put(3, 1, key=f"k-{epoch}")
        queue.complete(queue.admin, queue.lease(queue.admin, "plain", 2))
        queue.evict(1, epoch)
        queue.open_home("a")
        queue.check()
        queue.made = SERVER
        assert queue.put(3, 1, key=f"k-{epoch}").count == 2
        queue.complete(queue.admin, queue.lease(queue.admin, "plain"))
        queue.complete(queue.admin, queue.lease(queue.admin, "last"))
    assert (queue.audit().consumed, queue.audit().failed) == (29 * 3, 29 * 2)
