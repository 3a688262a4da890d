"""Workers on hosts that ssh reaches: started, supervised and ended as those of this host. By a real sshd on loopback."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import functions
import pytest
from children import Child, hear, say
from echo_runs import TOML
from processes import alive
from ssh_hosts import SshServer
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.cli.doctor import examine
from asyncflow_sdk.types.events import Event, WorkerState


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    with SshServer(tmp_path_factory.mktemp("ssh") / "server") as made:
        yield made


def stage(config: str, function: Any = functions.length, **options: Any) -> af.Stage:
    placed = {"hosts": ["here"], "launcher": "ssh", "launcher_options": {"config": config}}
    given = {"task": "w", "needs": ["response_ids"], "gives": ["length"]}
    return af.Stage(function, **(given | placed | options))


class Served:
    """A run with workers on two hosts. ``events``: its workers' states."""

    def __init__(self, directory: Path, server: SshServer) -> None:
        self.directory, self.events = directory, list[WorkerState]()
        self.run = af.serve(directory, address="tcp://127.0.0.1:0", on_event=self.hear)
        self.spec = stage(str(server.config), functions.starts_others, hosts=["here", "there"], batch=1)
        self.run.start(self.spec)
        self.run.queue.declare("end", needs=["length"])

    def hear(self, event: Event) -> None:
        if isinstance(event, WorkerState):
            self.events.append(event)

    def ready(self, worker: str, times: int = 1) -> None:
        """Wait until a worker has been ready so many times."""
        until(
            lambda: [e.state for e in self.events if e.worker == worker].count("ready") >= times, f"{worker} to work"
        )

    def restarts(self, worker: str) -> list[str]:
        return [e.detail for e in self.events if e.worker == worker and e.state == "restarting"]

    def score(self, rows: int) -> None:
        self.run.queue.put({"response_ids": [[1]] * rows})
        left = rows
        while left:
            with self.run.queue.get("end", left, timeout_s=60) as batch:
                left -= len(batch.ids)
                batch.ack()


@pytest.fixture(scope="module")
def served(server: SshServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("runs") / "run", server)
    with made.run:
        for worker in ("w-0", "w-1"):
            made.ready(worker)
        yield made


@pytest.mark.starts("launcher ssh")
def test_replicas_take_turns_on_the_hosts_and_log_into_the_run(served: Served) -> None:
    served.score(4)

    assert [worker.spec.host for worker in served.run.workers] == ["here", "there"]
    logs = [served.directory / "logs" / f"w-{number}.log" for number in (0, 1)]
    until(lambda: any("started" in log.read_text() for log in logs), "what they print")


def test_the_key_is_in_no_command_line_and_no_environment(served: Served) -> None:
    secret = json.loads((served.directory / "run.key").read_text())["secret"].encode()
    seen = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            shown = [(process / name).read_bytes() for name in ("cmdline", "environ")]
        except OSError:
            continue
        seen += b"asyncflow_sdk.workflow" in shown[0]
        assert not any(secret in each for each in shown), shown[0]
    assert seen >= 4, "two agents and two workers"


def test_a_killed_worker_is_started_again(served: Served) -> None:
    worker = served.run.workers[0]
    until(lambda: worker.pid, "its number")

    os.kill(worker.pid, signal.SIGKILL)

    served.ready("w-0", 2)
    assert served.restarts("w-0")[-1].startswith("was killed by SIGKILL; restart 1 of 3")
    served.score(2)


def test_a_worker_ends_with_its_connection_and_so_do_its_children(served: Served) -> None:
    """Also one that is frozen. Another connection brings another worker."""
    log, found = served.directory / "logs" / "w-1.log", list[str]()
    until(
        lambda: served.score(2) or found.extend(re.findall(r"started (\d+)\n", log.read_text())) or found,
        "a row of its",
    )
    pid, children = served.run.workers[1].pid, [int(number) for number in found]
    assert any(map(alive, children))
    os.kill(pid, signal.SIGSTOP)
    agent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    session = int(Path(f"/proc/{agent}/stat").read_text().rsplit(")", 1)[1].split()[1])

    os.kill(session, signal.SIGKILL)  # the process of sshd for this connection

    until(lambda: not any(map(alive, (pid, agent, *children))), "the end of the worker and its children")
    served.ready("w-1", 2)
    assert "restart 1 of 3" in served.restarts("w-1")[-1]


def test_workers_are_added_and_dismissed(served: Served) -> None:
    added = served.run.scale(served.spec, 3)
    served.ready("w-2")
    pids = [worker.pid for worker in added]

    served.run.scale(served.spec, 1)

    until(lambda: [alive(pid) for pid in pids] == [True, False, False], "the end of the surplus ones")
    assert added[2].spec.host == "here"


def serve_and_wait(directory: str, config: str) -> None:
    """A driver with one worker there, until it is killed."""
    with af.serve(directory, address="tcp://127.0.0.1:0") as run:
        (worker,) = run.start(stage(config, "functions:length"))
        until(lambda: worker.pid, "its number")
        say(worker.pid)
        hear()


def test_a_worker_ends_with_a_driver_that_is_killed(server: SshServer, tmp_path: Path) -> None:
    with Child(serve_and_wait, str(tmp_path / "run"), str(server.config)) as driver:
        pid = driver.hear()
        assert alive(pid)

        driver.kill()

        until(lambda: not alive(pid), "the end of the worker")


def test_each_cause_of_failure_is_named(server: SshServer, tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    python = str(tmp_path / "bare" / "bin" / "python")
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "name": ({"hosts": ["nowhere.invalid"]}, r"host 'nowhere.invalid': it is unknown; correct hosts="),
        "python": ({"python": "/no/such/python"}, r"host 'here' has no program '/no/such/python'"),
        "package": ({"python": python}, rf"{python} of host 'here' cannot load the AsyncFlow SDK: .*pip install"),
        "cpu": ({"cpus": [4095]}, r"host '.*': cpus=\[4095\]: this process may not use CPU 4095"),
        "module": ({"function": "no_such_module:f", "python": sys.executable}, r"no_such_module"),
        "function": ({"function": "functions:vanishes"}, r"exited with status 0 before"),
    }
    details: dict[str, str] = {}

    def hear(event: Event) -> None:
        if isinstance(event, WorkerState) and event.state == "failed":
            details[event.worker] = event.detail

    # a failure does not end the stream of a durable run
    with af.serve(tmp_path / "run", address="tcp://127.0.0.1:0", on_event=hear, durability="process") as run:
        run.queue.put({"response_ids": [[1]]})
        for task, (changes, _) in cases.items():
            run.start(stage(str(server.config), **{"task": task, "gives": [task], "max_restarts": 0, **changes}))
        until(lambda: all(worker.ended.is_set() for worker in run.workers), "the end of all")
        run.queue.end(cancel=True)

    for task, (_, cause) in cases.items():
        assert re.search(cause, details[f"{task}-0"]), details[f"{task}-0"]


def test_a_refused_key_and_an_unreachable_run_are_named(server: SshServer, tmp_path: Path) -> None:
    other = tmp_path / "client"
    other.write_text(server.config.read_text().replace("user_key", "host_key"))
    causes = []
    for config, advertise in ((str(other), None), (str(server.config), "127.0.0.99")):
        with af.serve(tmp_path / f"run-{len(causes)}", address="tcp://127.0.0.1:0", advertise=advertise) as run:
            (worker,) = run.start(stage(config, max_restarts=0))
            until(worker.ended.is_set, "its end")
            causes.append(str(getattr(run.failure, "detail", "")))

    assert "host 'here': it refuses the keys of this user" in causes[0]
    assert "the run cannot be reached: nobody listens at tcp://127.0.0.99:" in causes[1]
    assert "advertise=" in causes[1]


def test_the_doctor_looks_at_the_hosts_of_a_workflow(server: SshServer, tmp_path: Path) -> None:
    (tmp_path / "ssh_config").write_text(server.config.read_text())
    options = "launcher = 'ssh', launcher_options = { config = './ssh_config' }, hosts = ['here', 'nowhere.invalid']"
    text = TOML.replace('"prompt_ids", ', f'"prompt_ids", {options}, ')
    (tmp_path / "run.toml").write_text('address = "tcp://127.0.0.1:0"\n' + text)

    findings = {f"{each.where}: {each.message}" for each in examine([tmp_path / "run.toml"], [], []).findings}

    here, nowhere = (f"host {host}, {sys.executable}: " for host in ("here", "nowhere.invalid"))
    for words in (f"{here}rollout echo of ", f"{nowhere}host 'nowhere.invalid': it is unknown"):
        assert any(each.startswith(words) for each in findings), findings


def test_hosts_without_an_address_are_refused(server: SshServer) -> None:
    with af.serve() as run, pytest.raises(af.ConfigError, match=r"no address for them: serve\(address=\.\.\.\)"):
        run.start(stage(str(server.config)))
    with af.serve() as run, pytest.raises(af.ConfigError, match=r'needs hosts=, as hosts=\["gpu1", "gpu2"\]'):
        run.start(stage(str(server.config), hosts=[]))
    with af.serve() as run, pytest.raises(af.ConfigError, match=r"launcher_options= of launcher 'ssh': .*port"):
        run.start(stage("", launcher_options={"port": 22}))
    with pytest.raises(af.ConfigError, match="as ssh takes them, not '-oProxyCommand=x'"):
        stage("", hosts=["-oProxyCommand=x"])
