"""Algorithms by name, class, path and instance: checked here, made in the trainer's worker, made again by who resumes."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from echo_runs import TOML, echo_workflow, events_of
from plugin_packages import install_plugin

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, PluginError
from asyncflow_sdk.testing import EchoTrain

TRAINED = "test_algorithms:ShowTrain"


class ShowTrain(EchoTrain):
    """An engine whose model is also the algorithm that it was given."""

    def __init__(self, model: str = "", *, algorithm: Any) -> None:
        super().__init__(model)
        self.algorithm = algorithm

    def export(self, path: Path) -> None:
        super().export(path)
        (path / "algorithm").write_text(repr(self.algorithm))


@dataclass(frozen=True)
class Penalised(af.Algorithm):
    beta: float = 0.1

    def advantages(self, batch: Any) -> Any:
        return batch.array("reward")

    def loss(self, tokens: Any) -> Any:
        return -(tokens.logprobs * tokens.advantages).sum() / tokens.total_tokens, {}


@dataclass(frozen=True)
class Referring(Penalised):
    needs = ("ref_logprobs",)


def quarter() -> Penalised:
    """No class, but what makes one."""
    return Penalised(beta=0.25)


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The algorithms "penalised" and "referring" are installed; returns where."""
    return install_plugin(
        tmp_path, monkeypatch, "penalising",
        "import asyncflow_sdk as af\n@af.hookimpl\ndef asyncflow_adapters(sdk):\n"
        "    make = lambda n, f: af.AdapterSpec(kind='algorithm', name=n, factory=f'test_algorithms:{f}')\n"
        "    return [make('penalised', 'Penalised'), make('referring', 'Referring')]\n",
    )  # fmt: skip


def trained_by(directory: Path, algorithm: Any) -> str:
    """What the engine in the trainer's worker was given."""
    flow = echo_workflow(steps=1, train=af.Train(TRAINED, algorithm=algorithm, launcher="thread"))
    flow.run(directory)
    return (directory / "model" / "algorithm").read_text()


@pytest.mark.parametrize(
    "algorithm",
    [
        Penalised(beta=0.25),
        (Penalised, {"beta": 0.25}),
        "test_algorithms:quarter",
        ["penalised", {"beta": 0.25}],
    ],
)
def test_the_workers_engine_gets_what_was_asked_for(tmp_path: Path, plugin: Path, algorithm: Any) -> None:
    assert trained_by(tmp_path / "run", algorithm) == "Penalised(beta=0.25)"


def test_without_one_it_is_grpo(tmp_path: Path) -> None:
    assert trained_by(tmp_path / "run", None) == repr(af.GRPO())
    assert af.Train("echo", algorithm=("grpo", {"clip_high": 0.3})).algorithm == af.GRPO(clip_high=0.3)


def test_columns_that_it_needs_are_given_to_the_trainer_and_asked_of_the_workflow() -> None:
    with pytest.raises(ConfigError, match="task 'train' needs 'ref_logprobs'.*, which nobody gives"):
        echo_workflow(train=af.Train("echo", algorithm="test_algorithms:Referring"))
    flow = echo_workflow(
        train=af.Train("echo", algorithm="test_algorithms:Referring"),
        stages=[af.Stage(af.Logprobs("echo"), gives=["ref_logprobs"])],
    )
    assert "ref_logprobs" in flow.plan.train.needs
    assert "Referring" in str(flow)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (("grpo", {"clip_hi": 1}), "algorithm 'grpo' has no option 'clip_hi'; did you mean 'clip_high'"),
        (("grpo", {"clip_low": 2}), "clip range .* is empty"),
        ("a2c", "no algorithm adapter is named 'a2c'; installed: grpo, dr_grpo, dapo, gspo, cispo, ppo"),
        (("grpo", {"mean": "median"}), "mean must be 'tokens' or 'rows' or 'length', not str: 'median'"),
        (("ppo", {"critic": {"decay": 2}}), "critic: decay must be from 0 to 1"),
        (("grpo", {"kl": 0.1}), "GRPO: kl must be KL or None, not float"),
        ("builtins:dict", "is a dict, not an asyncflow_sdk.Algorithm"),
        ("test_algorithms:Nothing", "importing 'test_algorithms:Nothing' failed"),
        (3, "an algorithm must be a name, a class, either with options, or an Algorithm, not 3"),
        (Penalised(beta={1, 2}), None),  # type: ignore[arg-type]
        (Penalised(beta=object()), "options must be JSON"),  # type: ignore[arg-type]
        (("grpo", [1]), "an algorithm must be a name"),
    ],
)
def test_what_is_wrong_is_told_before_anything_starts(algorithm: Any, message: str | None) -> None:
    if message is None:
        af.Train("echo", algorithm=algorithm)
        return
    with pytest.raises((ConfigError, PluginError), match=message):
        af.Train("echo", algorithm=algorithm)


def test_one_that_no_worker_can_make_again_is_refused() -> None:
    @dataclass(frozen=True)
    class Local(Penalised):
        pass

    class Plain(af.Algorithm):
        def advantages(self, batch: Any) -> Any: ...
        def loss(self, tokens: Any) -> Any: ...

    with pytest.raises(ConfigError, match="Local cannot be imported by the trainer's worker"):
        af.Train("echo", algorithm=Local())
    with pytest.raises(ConfigError, match="is not a dataclass, so its fields cannot be sent"):
        af.Train("echo", algorithm=Plain())


def test_it_is_asked_whether_it_can_train_the_groups() -> None:
    rollout = af.Rollout("echo", group_size=1, prompt="prompt_ids")
    with pytest.raises(ConfigError, match="group_size is 1"):
        echo_workflow(rollout=rollout)
    echo_workflow(rollout=rollout, train=af.Train("echo", algorithm=Penalised()))


def test_one_that_only_another_interpreter_has_is_not_looked_for_here() -> None:
    flow = echo_workflow(train=af.Train("echo", algorithm=("theirs", {"x": 1}), python=sys.executable))
    assert flow.plan.train.algorithm is None
    assert flow.describe()["train"]["algorithm"] == {"theirs": {"x": 1}}


def test_columns_of_one_that_only_the_worker_has_are_asked_for_before_the_first_prompt(
    tmp_path: Path, plugin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given: the algorithm is installed where the trainer runs, and not here
    monkeypatch.setenv("ASYNCFLOW_NO_PLUGINS", "penalising")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(plugin), os.environ.get("PYTHONPATH", "")]))
    theirs = {"algorithm": "referring", "python": sys.executable, "env": {"ASYNCFLOW_NO_PLUGINS": ""}}
    flow = echo_workflow(train=af.Train("echo", **theirs))
    assert flow.plan.train.algorithm is None

    with pytest.raises(
        af.WorkerFailed, match=r"'referring' needs columns .* say Train\(..., needs=\['ref_logprobs'\]\)"
    ):
        flow.run(tmp_path / "run")

    assert not [span for span in events_of(tmp_path / "run", "span") if span["kind"] == "generate"]


def test_a_file_says_it_with_a_name_and_options(tmp_path: Path, plugin: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        TOML.replace(
            'train = { engine = "echo" }',
            'train = { engine = "echo", algorithm = { name = "penalised", beta = 0.75 } }',
        )
    )
    assert af.load_workflow(file).plan.train.algorithm == Penalised(beta=0.75)
    assert af.load_workflow(file, {"train.algorithm.beta": "0.5"}).plan.train.algorithm == Penalised(beta=0.5)
    assert af.load_workflow(file, {"train.algorithm": "grpo"}).plan.train.algorithm == af.GRPO()
    with pytest.raises(ConfigError, match=r"train.algorithm.betta=1: there is no such key; did you mean 'beta'"):
        af.load_workflow(file, {"train.algorithm.betta": "1"})
    parts = {"train.algorithm.name": "ppo", "train.algorithm.critic.decay": "0.9", "train.algorithm.entropy": "0.1"}
    file.write_text(file.read_text().replace('"penalised", beta = 0.75', '"ppo", critic = { clip = 0.5 }'))
    ppo = af.load_workflow(file, parts).plan.train.algorithm
    assert ppo == af.PPO(critic=af.Critic(clip=0.5, decay=0.9), entropy=0.1)
    elsewhere = {"train.algorithm.name": "theirs", "train.python": sys.executable}
    file.write_text(file.read_text().replace('"ppo", critic = { clip = 0.5 }', '"penalised", beta = 0.75'))
    assert af.load_workflow(file, elsewhere).plan.train.algorithm_spec.options == {"beta": 0.75}


def test_parts_of_an_algorithm_travel_and_are_made_again(tmp_path: Path) -> None:
    algorithm = af.GRPO(kl=af.KL(coef=0.1, where="reward"), overlong=af.Overlong(max_tokens=9, buffer=3))
    reference = af.Stage(af.Logprobs("echo"), gives=["ref_logprobs"], launcher="thread")
    flow = echo_workflow(steps=1, stages=[reference], train=af.Train(TRAINED, algorithm=algorithm, launcher="thread"))
    flow.run(tmp_path / "run")
    assert (tmp_path / "run" / "model" / "algorithm").read_text() == repr(algorithm)


def test_an_engine_that_cannot_compute_what_is_asked_is_refused_before_the_first_prompt(tmp_path: Path) -> None:
    flow = echo_workflow(train=af.Train(TRAINED, algorithm=af.PPO(), launcher="thread"))

    with pytest.raises(af.WorkerFailed, match="'PPO' asks its engine for values, which engine .* does not compute"):
        flow.run(tmp_path / "run")

    assert not [span for span in events_of(tmp_path / "run", "span") if span["kind"] == "generate"]
