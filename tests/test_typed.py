"""Commands of README and documents, typed as written in a folder of a user, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.request import HTTPCookieProcessor, build_opener

import pytest
from children import warm_python
from commands import Command
from documented import CLONE, items
from hosts_in_namespaces import network
from ssh_hosts import ssh_servers
from waiting import until

import asyncflow_sdk as af
from benchmarks.hosts.network import Network

pytestmark = pytest.mark.timeout(900)  # each command starts processes, and each of these imports torch
REWARDS = """\
import pathlib, time

def exact_match(response, answer):
    return [float(text == right) for text, right in zip(response, answer)]

async def politeness(response):
    return [float("please" in text) for text in response]

def ones(response):
    return [float(text.count("1")) for text in response]

def lengths(response_ids):
    return [float(len(ids)) for ids in response_ids]

def notes(response):
    return [[float(len(text))] * 16_384 for text in response]

def held(response, answer):
    while len(list(pathlib.Path("hold/steps").glob("*"))) > 1:
        time.sleep(0.01)
    return exact_match(response, answer)
"""
SERVE = "docs/running.md: asyncflow serve runs/x --address tcp://0.0.0.0:7000 --prompts data.jsonl --group-size 8 --steps 200"
SMALL_HOSTS = {
    "steps = 200": "steps = 2",
    "batch_size = 256": "batch_size = 32",
    "group_size = 8": "group_size = 8\nsampling = { max_tokens = 7 }",
    "/models/start": "./model",
    'launcher = "ssh"': 'launcher = "ssh"\nlauncher_options = { config = "./ssh_config" }',
}
SMALL_WORKERS = {
    "transformers --model PATH": "transformers --model model --max-tokens 7",
    "MODULE:FUNCTION": "rewards:ones",
    "torch --model PATH --batch-size 256": "torch --model model --batch-size 32",
}
"""Placeholders and sizes in the documents, with the smaller values used here."""


def typed(
    words: str, folder: Path, more: str = "", replaced: Sequence[tuple[str, str]] = (), within: Sequence[str] = ()
) -> Command:
    """Type words of the documents. ``more``: further words, to end sooner. ``replaced``: placeholders and their values.

    Programs of the folder's bin fork from a process with torch, also on other hosts.
    """
    for placeholder, value in replaced:
        assert placeholder in words
        words = words.replace(placeholder, value)
    words = words if "&&" in words else f"exec {words}"  # bash is then that process, which gets the signals
    path = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    return Command([*within, "bash", "-c", f"{words} {more}"], folder, {"PATH": path, "COLUMNS": "150"})


def interrupted(running: Command, then: Callable[[], object] = lambda: None) -> None:
    """Press Ctrl-C, and wait for its end."""
    pid = running.process.pid
    while Path(f"/proc/{pid}/comm").read_text() == "unshare\n":  # of a host: it ignores the signal
        pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
    os.kill(pid, signal.SIGINT)
    then()
    assert running.end() == 130, running.said


def ended(running: Command) -> str:
    """Wait until it ends with status 0. Return the text it has printed."""
    with running:
        assert running.end() == 0, running.said
    return running.said


def command(item: str) -> str:
    """The words of an item of the list."""
    assert item in items()
    return item.partition(": ")[2]


def block(document: str, kind: str, number: int = 0) -> str:
    return re.findall(rf"```{kind}\n(.*?)```", (CLONE / document).read_text(), re.S)[number]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: the examples, a model and data as examples/README.md says, rewards, and the file of the quickstart."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "bin").mkdir()
    for name, words in (("python", ""), ("asyncflow", "-m asyncflow_sdk.cli")):
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {warm_python()} {words} "$@"\n')
        program.chmod(0o755)
    (folder / "examples").symlink_to(CLONE / "examples")
    ended(typed("python -m asyncflow_torch.demo.model runs/start", folder, "0"))  # test_guide.py warms it up
    for name in ("model", "data.jsonl"):
        (folder / name).symlink_to(f"runs/start/{name}")
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "train.toml").write_text(block("docs/quickstart.md", "toml"))
    return folder


@pytest.fixture
def type_(folder: Path) -> Callable[..., str]:
    """Type an item, and wait for its end."""

    return lambda item, *more, **options: ended(typed(command(item), folder, *more, **options))


# ---- on this host


@pytest.mark.starts(
    "examples/README.md: python -m asyncflow_torch.demo.model runs/start",
    "examples/README.md: python examples/own_loop.py runs/start/model runs/start/data.jsonl runs/own-loop",
)
def test_the_first_example_trains_the_model_made_for_it(type_: Callable[..., str]) -> None:
    said = type_(
        "examples/README.md: python examples/own_loop.py runs/start/model runs/start/data.jsonl runs/own-loop"
    )

    assert "live=0" in said


@pytest.mark.starts(
    "docs/plugins.md: asyncflow doctor run.toml --python .venv-other/bin/python --address tcp://0.0.0.0:7000"
)
def test_file_is_examined_for_two_interpreters(type_: Callable[..., str]) -> None:
    said = type_(
        "docs/plugins.md: asyncflow doctor run.toml --python .venv-other/bin/python --address tcp://0.0.0.0:7000",
        replaced=[("run.toml", "train.toml"), (".venv-other/bin/python", sys.executable)],
    )

    assert "tcp://0.0.0.0:7000" in said


@pytest.mark.starts(
    "docs/workflow.md: asyncflow run train.toml --print",
    "docs/workflow.md: asyncflow run train.toml --mermaid",
    "docs/workflow.md: asyncflow run train.toml runs/mine --set train.learning_rate=1e-5 --set rollout.replicas=2",
)
def test_a_file_is_shown_and_run_with_other_values(type_: Callable[..., str], folder: Path) -> None:
    assert "steps" in type_("docs/workflow.md: asyncflow run train.toml --print")
    assert "flowchart" in type_("docs/workflow.md: asyncflow run train.toml --mermaid")

    said = type_(
        "docs/workflow.md: asyncflow run train.toml runs/mine --set train.learning_rate=1e-5 --set rollout.replicas=2",
        "--set steps=2", replaced=[("runs/mine", "runs/changed")],
    )  # fmt: skip

    assert "2 steps of" in said
    assert {path.name for path in (folder / "runs" / "changed" / "logs").glob("rollout-*")} == {
        "rollout-0.log",
        "rollout-1.log",
    }


@pytest.mark.starts(
    "docs/resuming.md: asyncflow resume runs/first", "docs/resuming.md: asyncflow replay runs/first", "asyncflow replay",
    "docs/seeing.md: asyncflow web runs/first", "asyncflow trace",
)  # fmt: skip
def test_an_interrupted_run_is_shown_resumed_and_replayed(type_: Callable[..., str], folder: Path) -> None:
    # given a run with checkpoints that goes no further than two steps, and its page
    (folder / "hold").symlink_to("runs/first")
    steps = folder / "runs" / "first" / "steps"
    changes = "--set steps=8 --set 'checkpoint={ every = 1, history = true }' --set reward=rewards:held"
    with typed("asyncflow run train.toml runs/first", folder, changes) as run:
        until(lambda: len(list(steps.glob("*.safetensors"))) > 1, "two steps", 250.0)
        with typed(command("docs/seeing.md: asyncflow web runs/first"), folder) as page:
            url = page.until(r"http://\S+")[0]
            with build_opener(HTTPCookieProcessor()).open(url, timeout=100) as answer:
                assert b"<title>" in answer.read()
            interrupted(page)
        # when
        interrupted(run, (folder / "hold").unlink)
    said = type_("docs/resuming.md: asyncflow resume runs/first")
    # then
    replayed = type_("docs/resuming.md: asyncflow replay runs/first")
    ended(typed("asyncflow trace runs/first", folder))
    assert json.loads((folder / "runs" / "first" / "trace.json").read_text())
    assert "runs/first: completed, 8 of 8 steps trained" in said
    assert re.search(r"\d+ records replayed, 0 with other answers", replayed)


@pytest.mark.starts("transport dist", "rollout timed")
def test_adapters_run_in_processes_of_their_own(folder: Path) -> None:
    over_dist = typed("asyncflow run train.toml runs/dist", folder, "--set steps=2 --set weights.transport=dist")
    assert "2 steps of" in ended(over_dist)
    (folder / "timed.toml").write_text(
        'steps = 2\nbatch_size = 8\nprompts = "ids.jsonl"\nreward = "rewards:lengths"\n'
        '[rollout]\nengine = "timed"\nprompt = "prompt_ids"\ngroup_size = 4\n[train]\nengine = "timed"\n'
    )
    (folder / "ids.jsonl").write_text("".join(f'{{"prompt_ids": [{number}, 2]}}\n' for number in range(1, 9)))
    assert "2 steps of" in ended(typed("asyncflow run timed.toml runs/timed", folder))


@pytest.mark.starts("docs/evaluation.md: asyncflow export runs/evaluated my-model --step 20", "asyncflow export")
def test_a_model_of_an_evaluated_run_is_exported(type_: Callable[..., str], folder: Path) -> None:
    given = "import asyncflow_sdk as af\nmodel, prompts = 'model', af.load_prompts('data.jsonl')\n"
    (folder / "evaluated.py").write_text(given + block("docs/evaluation.md", "python"))
    ended(typed("python evaluated.py", folder))

    type_(
        "docs/evaluation.md: asyncflow export runs/evaluated my-model --step 20", replaced=[("--step 20", "--step 2")]
    )

    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in (folder / "my-model").iterdir()
    }


@pytest.mark.starts('docs/gpu.md: python -c "import torch; print(torch.version.cuda, torch.cuda.is_available())"')
def test_torch_says_which_devices_it_finds(type_: Callable[..., str]) -> None:
    said = type_('docs/gpu.md: python -c "import torch; print(torch.version.cuda, torch.cuda.is_available())"')

    assert said.split()[-1] in ("True", "False")


@pytest.mark.parametrize(
    ("words", "more", "replaced"),
    [
        ("asyncflow check mine", "--only update", [("mine", "echo --kind rollout")]),
        (
            "asyncflow check mine.engine:Mine --option threads=2", "--only update",
            [("mine.engine:Mine", "asyncflow_sdk.testing:EchoRollout"), ("threads", "max_rows")],
        ),
        ("asyncflow check mine --only update --only stale_cache", "", [("mine", "echo --kind rollout")]),
        ("asyncflow check mine --model models/qwen --tier chaos --json mine.json", "--only killed", [("mine ", "transformers "), ("models/qwen", "model")]),
        ("asyncflow check transformers --dtype bfloat16 --option dtype=bfloat16", "--only greedy", []),
        ("asyncflow check mine --fail-fast", "--only update", [("mine", "echo --kind rollout")]),
        ('asyncflow check mine --expect "interrupted=the library cannot, its issue 1234"', "--only update", [("mine", "echo --kind rollout")]),
        ("asyncflow check shuffled --kind sampler", "", []),
        ("asyncflow check --list", "", []),
    ],
)  # fmt: skip
@pytest.mark.starts(
    "docs/conformance.md: asyncflow check mine",
    "docs/conformance.md: asyncflow check mine.engine:Mine --option threads=2",
    "docs/conformance.md: asyncflow check mine --only update --only stale_cache",
    "docs/conformance.md: asyncflow check mine --model models/qwen --tier chaos --json mine.json",
    "docs/conformance.md: asyncflow check transformers --dtype bfloat16 --option dtype=bfloat16",
    "docs/conformance.md: asyncflow check mine --fail-fast",
    'docs/conformance.md: asyncflow check mine --expect "interrupted=the library cannot, its issue 1234"',
    "docs/conformance.md: asyncflow check shuffled --kind sampler",
    "docs/conformance.md: asyncflow check --list",
)
def test_adapters_are_checked(
    type_: Callable[..., str], words: str, more: str, replaced: list[tuple[str, str]]
) -> None:
    type_(f"docs/conformance.md: {words}", more, replaced=replaced)


# ---- on three hosts


@pytest.mark.starts(
    "docs/running.md: asyncflow serve runs/x --address tcp://0.0.0.0:7000 --prompts data.jsonl --group-size 8 --steps 200",
    "docs/queue.md: asyncflow top runs/x",
    "docs/queue.md: asyncflow top tcp://10.0.0.1:7000 --key run.key",
    "docs/queue.md: asyncflow store tcp://10.0.0.1:7000 --key run.key",
    "asyncflow keys rotate",
    "asyncflow evict",
)
def test_each_host_joins_by_the_command_that_the_server_prints(folder: Path, tmp_path: Path) -> None:
    with network(3) as net, contextlib.ExitStack() as running:
        # given the server, and a copy of a key for new clients on each host
        head = net.address(1)
        server = typed(command(SERVE), folder, "--steps 3 --store hosts", [(" --steps 200", "")], net.within(1))
        running.enter_context(server)
        server.until(r"asyncflow top")
        there = tmp_path / "there"
        there.mkdir()
        (there / "bin").symlink_to(folder / "bin")
        shutil.copy(folder / "runs" / "x" / "run.key", there)
        store = command("docs/queue.md: asyncflow store tcp://10.0.0.1:7000 --key run.key")
        unit = running.enter_context(typed(store, there, "", [("10.0.0.1", head)], net.within(2)))
        unit.until("serv")
        top = json.loads(ended(typed("asyncflow top runs/x --once --json", folder, within=net.within(1))))
        (evicted,) = (each["id"] for each in top["sessions"] if each["name"] == "store")
        ended(typed(f"asyncflow evict runs/x {evicted}", folder, within=net.within(1)))
        ended(typed("asyncflow keys rotate runs/x", folder, within=net.within(1)))
        shutil.copy(folder / "runs" / "x" / "run.key", there)
        shutil.copy(folder / "rewards.py", there)
        (there / "model").symlink_to(folder / "model")
        top = command("docs/queue.md: asyncflow top tcp://10.0.0.1:7000 --key run.key")
        assert " put" in ended(typed(top, there, "--once", [("10.0.0.1", head)], net.within(2)))
        local = command("docs/queue.md: asyncflow top runs/x")
        assert " put" in ended(typed(local, folder, "--once", within=net.within(1)))
        # when each command is typed as it was printed
        printed = re.findall(r"^ +(asyncflow worker .*)$", server.said, re.M)
        workers = []
        for host, words, small in zip((2, 3, 1), printed, SMALL_WORKERS.items(), strict=True):
            words = re.sub(r"tcp://[^:]+", f"tcp://{head}", words)
            workers.append(running.enter_context(typed(words, there, "", [small], net.within(host))))
        # then all end with the stream
        for worker in workers:
            assert worker.end() == 0, worker.said
        assert "live=0" in ended(server)
    assert (folder / "runs" / "x" / "events.jsonl").read_text().count('"event":"step"') == 3


@pytest.fixture
def hosts(folder: Path, tmp_path: Path) -> Iterator[Network]:
    """Three hosts. ``head`` is the first; ssh reaches the others by the names gpu1 and gpu2, and run.toml is their page's."""
    text = block("docs/several-hosts.md", "toml")
    for written, value in SMALL_HOSTS.items():
        assert written in text
        text = text.replace(written, value)
    (folder / "run.toml").write_text(text)
    with network(3) as net, ssh_servers(net, tmp_path, {2: "gpu1", 3: "gpu2"}):
        shutil.copy(tmp_path / "ssh_config", folder)
        yield net


@pytest.mark.starts(
    "docs/several-hosts.md: [toml] steps = 200",
    "docs/several-hosts.md: asyncflow doctor run.toml",
    "docs/several-hosts.md: asyncflow run run.toml runs/first",
    "docs/several-hosts.md: scp head:runs/first/run.key . && chmod 600 run.key",
    "docs/several-hosts.md: asyncflow worker tcp://head:7000 --key run.key --from run.toml rollout",
)
def test_a_run_starts_its_workers_on_other_hosts_and_others_join_it(
    type_: Callable[..., str], folder: Path, hosts: Network
) -> None:
    first = [("runs/first", "runs/hosts")]
    # when it starts all of its workers
    examined = type_("docs/several-hosts.md: asyncflow doctor run.toml", within=hosts.within(1))
    said = type_("docs/several-hosts.md: asyncflow run run.toml runs/first", replaced=first, within=hosts.within(1))
    # then
    assert "host gpu1" in examined
    assert "2 steps of" in said
    # when its rollouts join by hand
    joined = [("runs/first", "runs/joined")]
    words = command("docs/several-hosts.md: asyncflow run run.toml runs/first")
    with typed(words, folder, "--set rollout.replicas=0", joined, hosts.within(1)) as run:
        run.until("--from run.toml rollout")
        until((folder / "runs" / "joined" / "run.key").exists, "the key", 250.0)
        copy = [("scp head:", "cp "), *joined]
        type_("docs/several-hosts.md: scp head:runs/first/run.key . && chmod 600 run.key", replaced=copy)
        worker = "docs/several-hosts.md: asyncflow worker tcp://head:7000 --key run.key --from run.toml rollout"
        type_(worker, replaced=[("head", hosts.address(1))], within=hosts.within(3))
        # then
        assert "2 steps of" in ended(run)


@pytest.mark.starts("store hosts")
def test_columns_stay_on_the_hosts_that_make_them(type_: Callable[..., str], folder: Path, hosts: Network) -> None:
    # given a stage on gpu1 with 128 KiB for each row, a trainer on gpu2 that reads them, and a run on the third host
    stage = """
[[stages]]
work = "rewards:notes"
hosts = ["gpu1"]
launcher = "ssh"
launcher_options = { config = "./ssh_config" }
"""
    more = 'needs = ["notes"]\nhosts = ["gpu2"]\nlauncher = "ssh"\nlauncher_options = { config = "./ssh_config" }\n'
    file = folder / "run.toml"
    file.write_text(f'store = "hosts"\ncheckpoint = {{ every = 1 }}\n{file.read_text()}{more}{stage}')
    before = hosts.link_bytes(1)
    # when
    words = "docs/several-hosts.md: asyncflow run run.toml runs/first"
    said = type_(words, replaced=[("runs/first", "runs/stored")], within=hosts.within(1))
    # then
    assert "2 steps of" in said
    steps = dict(af.read_steps(folder / "runs" / "stored"))
    payload = 2 * 32 * 16_384 * 8
    received, sent = (now - then for now, then in zip(hosts.link_bytes(1), before, strict=True))
    assert received < payload / 2, "the sample is one group of four"
    assert sent < payload / 2
    assert [len(batch.ids) for batch in steps.values()] == [8, 8]


@pytest.mark.starts(
    "docs/running.md: torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint head:29500 --no-python"
    " asyncflow worker tcp://head:7000 --key run.key train --engine fsdp --model PATH --batch-size 256",
    "docs/running.md: torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint head:29501 --no-python"
    " asyncflow worker tcp://head:7000 --key run.key --from run.toml stage ref_logprobs",
)
def test_torchrun_starts_ranks_of_a_trainer_and_of_a_stage_on_two_hosts(folder: Path, hosts: Network) -> None:
    # given a served run, with a rollout and a reward on the third host
    file = folder / "run.toml"
    stage = (
        '\n[[stages]]\nwork = { logprobs = "fsdp", model = "./model", world_size = 2 }\ngives = ["ref_logprobs"]\n'
    )
    file.write_text(file.read_text() + stage)
    head = hosts.address(1)
    with contextlib.ExitStack() as running:
        serve = [("runs/x", "runs/ranks"), (" --steps 200", "")]
        server = running.enter_context(typed(command(SERVE), folder, "--steps 2", serve, hosts.within(1)))
        server.until(r"asyncflow top")
        shutil.copy(folder / "runs" / "ranks" / "run.key", folder)
        worker = f"asyncflow worker tcp://{head}:7000 --key run.key"
        for words in (
            "rollout --engine transformers --model model --max-tokens 7",
            "stage rewards:ones --task reward --needs response --gives reward",
        ):
            running.enter_context(typed(f"{worker} {words}", folder, within=hosts.within(3)))
        # when torchrun is typed on both hosts
        small = [
            ("--nproc-per-node 8", "--nproc-per-node 1"),
            ("head:29", f"{head}:29"),
            ("tcp://head", f"tcp://{head}"),
        ]
        model = [("PATH", "model"), ("--batch-size 256", "--batch-size 32")]
        train, ref = (item for item in items() if item.startswith("docs/running.md: torchrun"))
        events = folder / "runs" / "ranks" / "events.jsonl"
        ready = re.compile(r'"state":"ready"[^\n]*"ref_logprobs')
        for item, more in ((ref, []), (train, model)):
            for host in (1, 2):
                ranks = typed(command(item), folder, replaced=[*small, *more], within=hosts.within(host))
                running.enter_context(ranks)
            until(lambda: len(ready.findall(events.read_text())) == 2, "both ranks of the stage", 600.0)
        # then
        assert "live=0" in ended(server)
    assert re.search(r'"event":"span"[^\n]*"ref_logprobs', events.read_text())
    assert [len(batch.ids) for _, batch in af.read_steps(folder / "runs" / "ranks")] == [32, 32]


@pytest.mark.starts(
    'docs/several-hosts.md: asyncflow resume runs/first --set \'rollout.hosts=["gpu2", "gpu3"]\' --set rollout.replicas=4'
    " --set train.world_size=2"
)
def test_an_interrupted_run_goes_on_with_other_workers(
    type_: Callable[..., str], folder: Path, hosts: Network
) -> None:
    # given a run that goes no further than two steps
    (folder / "hold").symlink_to("runs/elsewhere")
    changes = "--set steps=20 --set checkpoint.every=1 --set reward=rewards:held --set train.engine=fsdp"
    words = command("docs/several-hosts.md: asyncflow run run.toml runs/first")
    steps = folder / "runs" / "elsewhere" / "steps"
    moved = [("runs/first", "runs/elsewhere")]
    with typed(words, folder, changes, moved, hosts.within(1)) as run:
        until(lambda: len(list(steps.glob("*"))) > 1, "two steps", 600.0)
        interrupted(run, (folder / "hold").unlink)
    # when
    resume = next(item for item in items() if item.startswith("docs/several-hosts.md: asyncflow resume"))
    fewer = [*moved, ('"gpu2", "gpu3"', '"gpu2"'), ("replicas=4", "replicas=2")]
    said = type_(resume, replaced=fewer, within=hosts.within(1))
    # then
    assert "20 of 20 steps" in said
