"""Plan: a whole workflow with its settings, its dataflow, and the choices made for it with their
reasons.

``checks.check_plan`` finds its problems; ``plan_text`` prints it. Choices use the declarations of
engines, transports and launchers (``can`` of an AdapterSpec). An engine without a declaration is
asked in its worker, before its first prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...errors import ConfigError, PluginError
from ...interfaces import OnFailure, QueueOptions
from ...plugins import registry
from ...types import Batch, Checkpoint, Probe, Staleness, Store, Weights
from ...types.config import LOCAL, validate_probe
from ...types.defaults import MAX_FAILED, STALL_S
from ...types.validation import check_least
from ...weights import AUTO
from ...wire import is_loopback
from ..data import LongPrompts, Prompts, PromptStream, Selection
from ..evaluation import EVALUATION, SCORES, Evaluation
from ..loops.tokenizer import named_end_tokens
from ..loops.trackers import Tracked
from ..processes.launchers import reaches_hosts
from ..specs import TRAINED, Rollout, Stage, Train, takes_trained, trained_rollout
from .choices import Choice, choose_encoding, choose_swap, choose_transport
from .dataflow import PROMPTS, Dataflow, Edge, Node
from .problems import Key, Problems

AHEAD_STEPS = 3
"""Default capacity in steps beyond max_staleness: one is training, one is filling, one is being put."""
PROMPT, HELD_OUT = "prompt", "held-out prompt"
"""Names of the prompts of training and of an evaluation."""
PROBE_TOLERANCE, ROUNDED_PROBE_TOLERANCE = 0.01, 2.0
"""Limits of the default probe for float32, which GPUs multiply in 11 bits, and for less precise dtypes. Measured on
tiny models: at most 0.6 in bfloat16, and 3 and more by other weights."""


@dataclass(frozen=True, kw_only=True)
class WorkflowOptions:
    """The arguments of ``Workflow``, which describes them."""

    prompts: Prompts
    rename: Mapping[str, str] | None = None
    long_prompts: LongPrompts = "error"
    rollout: Rollout | Sequence[Rollout]
    train: Train
    batch_size: int
    steps: int
    reward: Callable[..., Any] | Stage | Sequence[Any] | None = None
    stages: Sequence[Stage] = ()
    staleness: Staleness | None = None
    weights: Weights | None = None
    epochs: int | None = None
    seed: int | None = None
    on_failure: OnFailure = "stop"
    max_failed: float = MAX_FAILED
    capacity_rows: int | None = None
    checkpoint: Checkpoint | None = None
    evaluate: Evaluation | None = None
    save_steps: int | None = None
    save_total_limit: int | None = None
    store: str | Store = LOCAL
    stall_timeout_s: float = STALL_S
    track: Tracked | Sequence[Tracked] = ()
    address: str | None = None
    advertise: str | None = None

    def __post_init__(self) -> None:
        check_least(1, save_steps=self.save_steps or 1, save_total_limit=self.save_total_limit or 1)


@dataclass(kw_only=True)
class Plan:
    """The parts of a workflow with all defaults filled in, beside its ``options``.

    ``data``: the prompts, without ``left_out`` ones; the first ones of a ``stream``. ``columns``: the selection with
    all its names. ``held_out``: the prompts of the evaluation. ``problems``: errors found so far. ``transport``: the
    chosen one. ``swaps``: the swap policy of each rollout; "auto": its worker asks the engine. ``choices``: all
    choices, with reasons. ``probe``: the chosen one."""

    options: WorkflowOptions
    data: Batch
    columns: Selection
    stream: PromptStream | None
    rollouts: tuple[Rollout, ...]
    stages: tuple[Stage, ...]
    train: Train
    staleness: Staleness
    weights: Weights
    capacity_rows: int
    held_out: Batch | None
    store: Store
    trackers: list[Any]
    problems: Problems = field(default_factory=Problems)
    transport: str = AUTO
    swaps: tuple[str, ...] = ()
    choices: tuple[Choice, ...] = ()
    probe: Probe | None = None
    warnings: list[str] = field(default_factory=list)
    left_out: int = 0

    def warn(self, text: str) -> None:
        """Add a warning for the start of the run, once."""
        if text not in self.warnings:
            self.warnings.append(text)

    def prompts_of(self, rollout: Rollout) -> Iterator[tuple[str, Batch]]:
        """The prompts of a rollout, by their name: PROMPT and HELD_OUT."""
        if takes_trained(rollout.partitions):
            yield PROMPT, self.data
        if self.held_out is not None and {EVALUATION, "*"}.intersection(rollout.partitions):
            yield HELD_OUT, self.held_out

    def change_prompts(self, name: str, data: Batch) -> None:
        """Take other prompts of a name, perhaps fewer."""
        if name == HELD_OUT:
            self.held_out = data
        else:
            self.data, self.left_out = data, self.left_out + self.data.rows - data.rows

    def prompt_limit(self, rollout: Rollout, name: str = "") -> int | None:
        """Return the most tokens of a prompt that leave room for a response; None if the context is unknown.
        ``name``: of the prompts, PROMPT or HELD_OUT; "": of both, the smaller limit."""
        context, most = rollout.config.get("max_position_embeddings"), rollout.sampling.max_tokens
        evaluation = self.options.evaluate
        if evaluation is not None and EVALUATION in rollout.partitions and rollout.admits and name != PROMPT:
            held_out = evaluation.sampling_of(rollout).max_tokens
            most = held_out if name == HELD_OUT else max(most, held_out)
        return context - most if isinstance(context, int) else None

    @property
    def rollout(self) -> Rollout:
        """The first rollout with trained columns."""
        return trained_rollout(self.rollouts)

    @property
    def stage_keys(self) -> list[Key]:
        """The key of each stage, for problems."""
        rewards: list[Key] = [("reward",)] if self.options.reward is not None else []
        return [*rewards, *(("stages", number) for number in range(len(self.stages) - len(rewards)))]

    @property
    def limits(self) -> QueueOptions:
        """The limits of the run's queue."""
        return {
            "steps": self.options.steps,
            "capacity_rows": self.capacity_rows,
            "max_staleness": self.staleness.max_staleness,
            "staleness_policy": self.staleness.policy,
            "keep_versions": self.weights.keep,
            "max_swapping": self.weights.max_swapping,
            "quorum": self.weights.quorum,
            "checkpoints": self.options.checkpoint is not None,
        }

    @property
    def chosen_weights(self) -> Weights:
        """The settings of weights with the chosen transport and probe."""
        return replace(self.weights, transport=self.transport, probe=self.probe)

    # ---- dataflow

    @property
    def nodes(self) -> list[Node]:
        """All tasks; rollouts that share a task are one. Raises ConfigError if these need or give different
        columns."""
        nodes: dict[str, Node] = {}
        listed: list[Node] = []
        for rollout in self.rollouts:
            spec = rollout.declare()
            node = Node(spec.name, spec.needs, spec.gives, spec.partitions)
            known = nodes.setdefault(spec.name, node)
            if known is node:
                listed.append(node)
            elif known != node:
                raise ConfigError(
                    f"rollouts of engines that share task {spec.name!r} must need and give the same columns of the"
                    f" same partitions: one needs {', '.join(known.needs)} and gives {', '.join(known.gives)}, the"
                    f" other needs {', '.join(node.needs)} and gives {', '.join(node.gives)}: name a tokenizer for"
                    " both, let both engines give the same columns (sampling_mask), or give one another task="
                )
        listed += [Node(stage.task, stage.needs, stage.gives, stage.partitions) for stage in self.stages]
        if self.options.evaluate is not None:
            listed.append(Node(SCORES.name, SCORES.needs, (), SCORES.partitions))
        return [*listed, Node(self.train.task, self.train.needs)]

    @property
    def dataflow(self) -> Dataflow:
        """The tasks of trained rows and their columns. Raises ConfigError as ``nodes`` does."""
        return Dataflow(list(self.columns.names.values()), [node for node in self.nodes if node.takes(TRAINED[0])])

    @property
    def other_dataflows(self) -> dict[str, Dataflow]:
        """The tasks of each other partition. Columns that no task gives count as put by others, except in the
        partition of an evaluation: its prompts are known."""
        nodes, found = self.nodes, {}
        for partition in dict.fromkeys(
            each for node in nodes for each in node.partitions if each not in ("*", *TRAINED)
        ):
            taking = [node for node in nodes if node.takes(partition)]
            given = {column for node in taking for column in node.gives}
            put = dict.fromkeys(column for node in taking for column in node.needs if column not in given)
            if partition == EVALUATION and self.held_out is not None:
                put = dict.fromkeys(self.held_out)
            found[partition] = Dataflow(list(put), taking)
        return found

    @property
    def edges(self) -> list[Edge]:
        """All columns from task to task: first of trained rows, then of other partitions."""
        found = self.dataflow.edges
        for partition, of in self.other_dataflows.items():
            put = [
                edge._replace(giver=f"partition {partition}") if edge.giver == PROMPTS else edge for edge in of.edges
            ]
            found += [edge for edge in put if edge not in found]
        return found

    # ---- choices

    def choose(self) -> None:
        """Choose the transport, its encoding, and each rollout's swap policy. Adds to ``problems``."""
        changes = self.columns.changes
        choices = [Choice("columns of the prompts", ", ".join(self.data), changes)] if changes else []
        swaps: list[str] = []
        weights = self.weights
        self.transport = weights.transport
        with self.problems.collect("weights", "transport"):
            choice = choose_transport(self._remote(), self._only(), asked=weights.transport)
            choices.append(self._with_device(choice))
            self.transport = choice.chosen
            encoding = choose_encoding(self.transport, weights)
            choices += [encoding] if encoding is not None else []
        for number, rollout in enumerate(self.rollouts):
            asked: str = rollout.swap or weights.swap
            key: Key = ("rollout", number, "swap") if rollout.swap else ("weights", "swap")
            with self.problems.collect(*key):
                choice = _swap(rollout, asked, tuple(weights.verify if rollout.verify is None else rollout.verify))
                choices.append(choice)
                asked = choice.chosen
            swaps.append(asked)
        self.swaps = tuple(swaps)
        with self.problems.collect("rollout"):
            choices += [*self._choose_probe(), *self._end_tokens()]
        self.choices = tuple(choices)

    def _choose_probe(self) -> Iterator[Choice]:
        """Choose the probe: without a given one, a default for engines that score responses and cannot compare
        bytes."""
        asked = self.weights.probe
        self.probe = asked if isinstance(asked, Probe) else None
        if asked is False:
            yield Choice("probe", "off", "as asked")
        scoring = [
            each
            for each, swap in zip(self.rollouts, self.swaps, strict=True)
            if swap != "in_flight"
            and {"logprobs", "held_weights"}.intersection(registry().declared("rollout", each.engine, "has") or ())
            == {"logprobs"}
        ]
        if asked is not None or not scoring:
            return
        temperature, vocabulary = self.train.options.get("temperature", 1.0), self.train.config.get("vocab_size")
        if temperature != 1.0:
            yield Choice(
                "probe", "off", f"one is compared at temperature 1, and training computes at {temperature:g}"
            )
        elif isinstance(vocabulary, int):
            published = self.weights.dtype or str(self.train.options.get("dtype") or "auto")
            dtypes = {str(each.options.get("dtype")) for each in scoring} | {self.train.dtype_of(published)}
            tolerance = PROBE_TOLERANCE if dtypes == {"float32"} else ROUNDED_PROBE_TOLERANCE
            # special tokens, which some models replace by images, are at the ends of a vocabulary
            low, high = vocabulary // 4, max(3 * vocabulary // 4, vocabulary // 4 + 1)
            prompts, responses = np.random.default_rng(0).integers(low, high, (2, 4, 5)).tolist()
            self.probe = validate_probe(Probe(prompts, responses, tolerance=tolerance), scored=False)
            names = ", ".join(dict.fromkeys(each.engine for each in scoring))
            reason = f"log-probs of {names} must be the trainer's to {tolerance:g}; af.Weights(probe=...) gives"
            yield Choice("probe", "4 sequences at each version", f"{reason} another one, probe=False none")

    def _end_tokens(self) -> Iterator[Choice]:
        """The end tokens of each model that names different ones in several places."""
        for model, task in {each.model: each.task for each in self.rollouts if each.model}.items():
            named = named_end_tokens(model)
            if len({frozenset(ids) for ids in named.values()}) > 1:
                reason = "; ".join(f"{where} names {', '.join(map(str, ids))}" for where, ids in named.items())
                ends = dict.fromkeys(end for ids in named.values() for end in ids)
                yield Choice(f"end tokens of {task}", ", ".join(map(str, ends)), reason)

    def _only(self) -> dict[str, tuple[str, ...]]:
        """The transports of each engine that declares a selection."""
        only = {}
        for rollout in self.rollouts:
            names = registry().declared("rollout", rollout.engine, "transports")
            if names is not None:
                only[f"engine {rollout.engine!r}"] = names
        return only

    def _remote(self) -> str:
        """Why some workers may be on other hosts; "" if none is."""
        for place in (*(each.place for each in self.rollouts), self.train.place):
            if reaches_hosts(place):
                return f"launcher {place.launcher!r} may start workers on other hosts"
        if self.options.address is not None and not is_loopback(self.options.address):
            return f"workers of other hosts may join at {self.options.address}"
        return ""

    def _with_device(self, choice: Choice) -> Choice:
        """Mention cuda-ipc if all engines are on GPUs of one host: it is chosen only on request."""
        options = (*(each.options for each in self.rollouts), self.train.options)
        devices = [each.get("device", "auto") for each in options]
        on_gpus = all(str(each).startswith("cuda") for each in devices)
        if choice.chosen != "shm" or self.weights.transport != AUTO or not on_gpus:
            return choice
        try:
            there = not registry().get("transport", "cuda-ipc").missing
        except (PluginError, ConfigError):
            there = False
        more = "; cuda-ipc would leave them on the GPU, and has to be asked for, as it was not run on one yet"
        return Choice(choice.what, choice.chosen, choice.reason + more) if there else choice


def _swap(rollout: Rollout, asked: str, verify: tuple[str, ...]) -> Choice:
    what, engine = f"swap of {rollout.task} {rollout.engine}", f"engine {rollout.engine!r}"
    can = registry().declared("rollout", rollout.engine, "swap")
    if can is not None:
        chosen = choose_swap(engine, set(can), asked, verify=verify)
        return Choice(what, chosen.chosen, chosen.reason)
    if asked != AUTO:
        return Choice(what, asked, f"as asked; {engine} says in its worker whether it can")
    return Choice(what, AUTO, f"{engine} says in its worker what it can, before the first prompt")
