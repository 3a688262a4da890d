"""A run whose processes are killed with SIGKILL, one after another, and which ends by itself with every row trained once.

python examples/survive_kills.py OUT_DIRECTORY [--model FOLDER] [--steps 200] [--every 10]

One of its two rollouts dies every 10 seconds, its trainer a third of the way, and after two thirds the process that drives it
and serves its queue, and with it all others; `asyncflow resume` goes on. Its trainer notes which rows its weights were trained
with, and keeps that in its checkpoints beside them: so the last note is of the weights that survived, whoever died.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import asyncflow_sdk as af
from asyncflow_torch.demo.model import warm_up
from asyncflow_torch.demo.run import ONE_THREAD
from asyncflow_torch.demo.task import DIGITS, exact_match, prompts
from asyncflow_torch.train import TorchEngine

GROUP, ROWS = 8, 128


class Noting(TorchEngine):
    """Knows which rows its weights were trained with: of each step the rows' ids, and their mean reward."""

    def __init__(self, model: str, **options) -> None:
        super().__init__(model, **options)
        self.notes: list[tuple[list[int], float]] = []

    def train_step(self, batch):
        result = super().train_step(batch)
        self.notes.append((batch.ids.tolist(), result.metrics["reward"]))
        return result

    def save(self, path: Path) -> None:
        super().save(path)
        (path / "notes.json").write_text(json.dumps(self.notes))

    def load(self, path: Path) -> None:
        super().load(path)
        self.notes = json.loads((path / "notes.json").read_text())

    def export(self, path: Path) -> None:
        super().export(path)
        (path / "notes.json").write_text(json.dumps(self.notes))


def workflow(model: Path, steps: int, seed: int = 0) -> af.Workflow:
    """Reverse five digits, as the demo does. Everything in it can be imported by a process that goes on with it."""
    return af.Workflow(
        prompts=prompts(steps * ROWS // GROUP, seed),
        rollout=af.Rollout(
            "transformers", model=model, replicas=2, group_size=GROUP, sampling=af.Sampling(max_tokens=DIGITS + 2),
            env=ONE_THREAD, max_restarts=1000,
        ),
        reward=exact_match,
        train=af.Train("survive_kills:Noting", model=model, learning_rate=2e-4, env=ONE_THREAD, max_restarts=3),
        batch_size=ROWS,
        steps=steps,
        staleness=af.Staleness(max_staleness=1),
        checkpoint=af.Checkpoint(every=5, history=True),
        seed=seed,
    )  # fmt: skip


class Killer:
    """Follows what a run writes down, and kills its processes. ``step``: the newest trained; ``killed``: how many of each."""

    def __init__(self, out: Path) -> None:
        self.step, self.killed = -1, Counter()
        self._events, self._read, self._pids = out / "events.jsonl", 0, {}
        self._began = time.monotonic()

    def look(self) -> None:
        """Hear what is new."""
        if not self._events.exists():
            return
        with self._events.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # it is being written
                self._read += len(line)
                self._hear(json.loads(line)) if line.strip() else None

    def _hear(self, event: dict) -> None:
        if event["event"] == "step":
            self.step = event["step"]
        elif event["event"] == "worker" and event["state"] == "ready":
            self._pids[event["worker"]] = event["pid"]
        elif event["event"] == "worker":
            self._pids.pop(event["worker"], None)

    def forget(self) -> None:
        """All it knew have ended with their driver."""
        self.look()
        self._pids.clear()

    def kill(self, *names: str) -> bool:
        """The first of these that is ready. Returns whether one was."""
        return any(name in self._pids and self.kill_process(name, self._pids.pop(name)) for name in names)

    def kill_process(self, name: str, pid: int) -> bool:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        self.killed[name] += 1
        after_s = time.monotonic() - self._began
        print(f"{after_s:6.1f} s  step {self.step:3d}  killed {name}, process {pid}", flush=True)
        return True


def survive(out: Path, model: Path, steps: int, every_s: float, every_steps: int) -> Counter:
    """Run it to its end, and kill: a rollout ``every_s`` seconds, or so many steps. Returns how often whom."""
    killer, due_s, due_step, turn = Killer(out), time.monotonic() + every_s, every_steps, 0
    drive = [__file__, str(out), "--model", str(model), f"--steps={steps}", "--drive"]
    driver = subprocess.Popen([sys.executable, *drive])
    while driver.poll() is None:
        time.sleep(0.02)
        killer.look()
        if killer.step >= steps // 3 and not killer.killed["train-0"]:
            killer.kill("train-0")
        if killer.step >= steps * 2 // 3 and not killer.killed["server"]:
            killer.kill_process("server", driver.pid)
            driver.wait()
            killer.forget()
            driver = subprocess.Popen([sys.executable, "-m", "asyncflow_sdk.cli", "resume", str(out)])
        if (killer.step >= due_step if every_steps else time.monotonic() >= due_s) and killer.step < steps - 1:
            pair = ("rollout-0", "rollout-1") if turn % 2 == 0 else ("rollout-1", "rollout-0")
            if killer.kill(*pair):
                turn, due_s, due_step = turn + 1, time.monotonic() + every_s, killer.step + every_steps
    if driver.returncode:
        sys.exit(f"the run ended with status {driver.returncode}")
    return killer.killed


def show(out: Path, killed: Counter) -> None:
    """What came of it: from what the trainer noted, from the journal carried out again, and from the run's own summary."""
    notes = json.loads((out / "model" / "notes.json").read_text())
    trained = Counter(row for rows, _ in notes for row in rows)
    rewards = [reward for _, reward in notes]
    window = max(1, len(rewards) // 5)
    first, last = sum(rewards[:window]) / window, sum(rewards[-window:]) / window
    found, summary = af.replay(out), json.loads((out / "summary.json").read_text())
    trainings = (out / "events.jsonl").read_text().count('"event":"step"')
    print(f"killed             {', '.join(f'{name}: {count}' for name, count in sorted(killed.items()))}")
    print(f"ended              {summary['status']}, {len(notes)} of {summary['steps_wanted']} steps in the weights")
    print(f"steps trained      {trainings}, {trainings - len(notes)} of them again, from a checkpoint")
    print(f"rows trained       {len(trained)}, {sum(count > 1 for count in trained.values())} of them twice")
    print(f"audit              {found.audit}; balanced: {found.audit.balanced}")
    print(f"journal            {found.records} records carried out again, {found.differing} with other answers")
    print(f"staleness          at most {af.staleness_of(out).values.max()}")
    print(f"reward             {first:.3f} -> {last:.3f} (first and last {window} steps)")


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("out", type=Path)
    asked.add_argument("--model", type=Path, help="a model folder; by default the demo's, warmed up first (10 s)")
    asked.add_argument("--steps", type=int, default=200)
    asked.add_argument("--every", type=float, default=10.0, help="seconds from one rollout's death to the next one's")
    asked.add_argument("--every-steps", type=int, default=0, help="so many steps instead")
    asked.add_argument("--drive", action="store_true", help=argparse.SUPPRESS)
    given = asked.parse_args()
    if given.drive:
        workflow(given.model, given.steps).run(given.out)
        return
    model = given.model or given.out / "start"
    if given.model is None:
        warm_up(model, seed=0)
    show(given.out, survive(given.out, model, given.steps, given.every, given.every_steps))


if __name__ == "__main__":
    main()
