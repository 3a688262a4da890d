"""A SLURM of two nodes on this machine, with its own configuration, ports and munged. Needs root and Debian's slurm-wlm."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from waiting import until

import asyncflow_sdk as af

NODES = ("n1", "n2")
os.environ["PATH"] += ":/usr/sbin"
_CONFIG = """
ClusterName=asyncflow
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout={slurmd_timeout_s}
SlurmdParameters=config_overrides
KillWait=2
MinJobAge=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=all Nodes=n1,n2 Default=YES PriorityTier=1
PartitionName=urgent Nodes=n1,n2 PriorityTier=2
"""


class SlurmCluster:
    """``slurmctld``, a ``slurmd`` for each of NODES, and ``munged``, while the block runs. ``folder``: of its files."""

    def __init__(self, *, slurmd_timeout_s: int = 300) -> None:
        self.variables: dict[str, str] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="asyncflow-slurm-"))
        self._timeout_s = slurmd_timeout_s
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> SlurmCluster:
        missing = [name for name in ("munged", "slurmctld", "slurmd", "srun") if shutil.which(name) is None]
        if missing or os.getuid():
            pytest.skip(f"needs root and Debian's slurm-wlm; missing: {missing}")
        try:
            self._configure()
            munge = self.folder / "munge"
            self._start("munged", "--foreground", "--force", *(
                f"--{name}={munge / path}" for name, path in (
                    ("key-file", "key"), ("socket", "socket"), ("pid-file", "pid"), ("log-file", "log"), ("seed-file", "seed"))
            ))  # fmt: skip
            until((munge / "socket").exists, "munged")
            self.start_controller()
            for node in NODES:
                self.start_node(node)
            self.undrain()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError, subprocess.SubprocessError, AssertionError):
            self.call("scancel", "--user=root")
            until(lambda: not self.jobs(), "the end of all jobs", 20)
        for name in reversed(self._running.copy()):
            self.kill(name)
        os.environ.pop("SLURM_CONF", None)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _configure(self) -> None:
        for name in ("munge", "state", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir(mode=0o700 if name != "munge" else 0o755)
        self.folder.chmod(0o755)
        key = self.folder / "munge" / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        with contextlib.ExitStack() as open_sockets:
            sockets = [open_sockets.enter_context(socket.socket()) for _ in range(3)]
            for each in sockets:
                each.bind(("127.0.0.1", 0))
            ports = [each.getsockname()[1] for each in sockets]
        text = _CONFIG.format(
            host=socket.gethostname(), ports=ports, folder=self.folder, slurmd_timeout_s=self._timeout_s
        )
        (self.folder / "slurm.conf").write_text(text)
        os.environ["SLURM_CONF"] = str(self.folder / "slurm.conf")

    def start_controller(self) -> None:
        self._start("slurmctld", "slurmctld", "-D")
        until(self._answers, "slurmctld")

    def start_node(self, node: str) -> None:
        self._start(node, "slurmd", "-D", "-N", node)

    def kill(self, name: str) -> None:
        """End "slurmctld", "munged" or a node's slurmd with SIGKILL. Jobs of a node run on."""
        process = self._running.pop(name)
        process.kill()
        process.wait()

    def undrain(self) -> None:
        """Make all nodes idle, in whatever state a test has left them."""
        for name in ("slurmctld", *NODES):
            if name not in self._running:
                self.start_controller() if name == "slurmctld" else self.start_node(name)
        self.call("scancel", "--user=root", "--full")

        def idle() -> bool:
            states = dict(line.split() for line in self.call("sinfo", "-hNo", "%N %T", "-p", "all").splitlines())
            for node, state in states.items():
                if state.rstrip("*") not in ("idle", "completing", "allocated", "mixed", "unknown"):
                    self.call("scontrol", "update", f"nodename={node}", "state=resume")
            return states == dict.fromkeys(NODES, "idle")

        until(idle, "idle nodes")

    def idle(self) -> bool:
        """True if no job is left."""
        return not self.jobs()

    def lose_node(self, worker: af.Worker) -> None:
        """End the node of the only job, with the worker, as SLURM does for a node that is silent for SlurmdTimeout."""
        node = self.call("squeue", "-ho", "%N").strip()
        self.kill(node)
        os.kill(worker.pid, signal.SIGKILL)
        self.call("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")

    def save_state(self) -> None:
        """Wait until a slurmctld that is killed will know its jobs again: it saves them every few seconds."""
        saved, now = self.folder / "state" / "job_state", time.time()
        for job in self.jobs():
            self.call("scontrol", "update", f"jobid={job.split()[0]}", "comment=changed")
        until(lambda: saved.exists() and saved.stat().st_mtime > now, "the saved state of slurmctld")

    def jobs(self) -> list[str]:
        """Return "NUMBER STATE" of each job that has not ended."""
        return self.call("squeue", "-ho", "%i %T").splitlines()

    def call(self, *command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout

    def _answers(self) -> bool:
        return "UP" in self.call("scontrol", "ping")

    def _start(self, name: str, *command: str) -> None:
        program = command if name != "munged" else ("munged", *command)
        log = (self.folder / f"{name}.out").open("ab")
        self._running[name] = subprocess.Popen(program, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        log.close()
