"""One run over five hosts by one command: two generate, and two hold a rank of the trainer each, reached by ssh. Real engines."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from children import warm_python
from hosts_in_namespaces import network
from ssh_hosts import ssh_servers

import asyncflow_sdk as af

STEPS = 3
PAGE = Path(__file__).parents[2] / "docs" / "several-hosts.md"
MINE = """\
def odd_tokens(response_ids):
    return [float(sum(int(token) % 2 for token in row)) / len(row) for row in response_ids]
"""


def curve(directory: Path) -> list[float]:
    """The mean reward of each step."""
    return [float(np.mean(batch["reward"])) for _, batch in af.read_steps(directory)]


@pytest.mark.starts("launcher ssh", "transport tcp", "train fsdp")
def test_a_run_on_five_hosts_learns_as_on_one(tiny: str, tmp_path: Path) -> None:
    # given the workflow of the guide, in small, and its run on one host
    rng = np.random.default_rng(0)
    rows = [{"prompt_ids": rng.integers(3, 43, 5).tolist()} for _ in range(8 * STEPS)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "five_hosts.py").write_text(MINE)
    (tmp_path / "run.toml").write_text(PAGE.read_text().split("```toml\n")[1].split("```")[0])
    small = {
        "steps": f"{STEPS}", "batch_size": "32", "reward": "five_hosts:odd_tokens", "staleness": "{ max_staleness = 0 }",
        "rollout.model": tiny, "rollout.prompt": "prompt_ids", "rollout.group_size": "4",
        "rollout.sampling": "{ max_tokens = 8, seed = 1 }", "train.model": tiny, "train.learning_rate": "1e-2",
        "train.engine": "fsdp", "train.world_size": "2",
    }  # fmt: skip
    python = warm_python()
    here = {
        "address": "tcp://127.0.0.1:0",
        "rollout.hosts": "[]",
        "rollout.launcher": "process",
        "rollout.replicas": "2",
    }
    here |= {"rollout.python": python, "train.python": python}
    af.load_workflow(tmp_path / "run.toml", small | here).run(tmp_path / "one")
    # when it is run on five
    with network(5) as net, ssh_servers(net, tmp_path, {2: "gpu1", 3: "gpu2", 4: "gpu3", 5: "gpu4"}):
        there = {"address": f"tcp://{net.address(1)}:7000", "rollout.launcher_options": '{ config = "./ssh_config" }'}
        there |= {"train.hosts": '["gpu3", "gpu4"]', "train.launcher": "ssh"}
        there["train.launcher_options"] = there["rollout.launcher_options"]
        changes = [word for name, value in (small | there).items() for word in ("--set", f"{name}={value}")]
        done = subprocess.run(
            [*net.within(1), python, "-m", "asyncflow_sdk.cli", "run", "run.toml", "several", *changes],
            cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        logs = {path.name: path.read_text() for path in (tmp_path / "several" / "logs").glob("*")}
        assert done.returncode == 0, done.stdout + done.stderr + str(logs)
    # then both hosts have generated, and each step has the rewards of that on one host
    summary = json.loads((tmp_path / "several" / "summary.json").read_text())
    assert summary["balanced"]
    assert set(summary["publish_lag"]) == {"rollout-0", "rollout-1"}
    assert f"asyncflow worker tcp://{net.address(1)}:7000 --key run.key --from run.toml rollout" in done.stdout
    assert curve(tmp_path / "several") == curve(tmp_path / "one")
