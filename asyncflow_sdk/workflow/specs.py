"""What a workflow is made of: Rollout, Stage and Train say what to run, and where. Data; nothing starts here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from ..errors import ConfigError
from ..interfaces import TRAIN_COLUMNS
from ..ledger import TaskSpec
from ..types import GRPO, VERSION_SPANS, Sampling, Weights
from ..types.config import Proof, SwapPolicy, check_policy, check_proofs

OnFailure = Literal["stop", "continue"]
RESPONSE_COLUMNS = ("response_ids", "logprobs", VERSION_SPANS)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a worker runs: its interpreter (of an environment that has the SDK and the engine), and variables
    added to its environment. ``max_restarts``: how often it is started again after dying.

    ``launcher``: what starts it, found through the hook. ``cpus``, ``gpus``: those of its host that it may use; () leaves
    them. ``on_failure``: whether the run stops or goes on when it has failed for good; None: as the workflow says.
    """

    python: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 3
    launcher: str = "process"
    cpus: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()
    on_failure: OnFailure | None = None

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ConfigError(f"max_restarts must be 0 or more, not {self.max_restarts}")
        if self.on_failure not in (None, *get_args(OnFailure)):
            raise ConfigError(f"on_failure is one of {', '.join(get_args(OnFailure))}, not {self.on_failure!r}")
        for name in ("cpus", "gpus"):
            numbers = getattr(self, name)
            if any(type(n) is not int or n < 0 for n in numbers) or len(set(numbers)) < len(numbers):
                raise ConfigError(f"{name} are different numbers from 0, as [0, 1], not {list(numbers)}")


class Rollout:
    """Generates responses: ``replicas`` workers with the rollout engine ``engine``, found through the hook.

    ``model``: a Hugging Face model folder. ``prompt``: the column of prompts; "prompt_ids" holds token ids,
    any other holds text. ``tokenizer``: a folder or tokenizer.json; by default the model's. ``lease_s``: how long
    prompts may take before others try them. ``swap``, ``verify``: when new weights are loaded, and what a load must prove; see
    ``Weights``, whose they are in a workflow unless given here. ``options`` are the engine's own.
    """

    task = "rollout"

    def __init__(
        self,
        engine: str,
        *,
        model: str | Path = "",
        group_size: int = 8,
        sampling: Sampling | None = None,
        replicas: int = 1,
        prompt: str = "prompt",
        tokenizer: str | Path | None = None,
        python: str | None = None,
        env: Mapping[str, str] | None = None,
        max_restarts: int = 3,
        launcher: str = "process",
        cpus: Sequence[int] = (),
        gpus: Sequence[int] = (),
        on_failure: OnFailure | None = None,
        lease_s: float = 3600.0,
        swap: SwapPolicy | None = None,
        verify: Sequence[Proof] | None = None,
        **options: Any,
    ) -> None:
        check_policy(swap or "drain")
        check_proofs(verify or ())
        self.swap, self.verify = swap, verify
        if group_size < 1 or replicas < 1:
            raise ConfigError(f"group_size and replicas must be 1 or more, not {group_size} and {replicas}")
        self.engine, self.model, self.group_size, self.replicas = engine, str(model), group_size, replicas
        self.sampling = sampling or Sampling()
        self.lease_s = lease_s
        self.prompt, self.options = prompt, _plain(engine, options)
        self.place = Place(
            python=python, env=dict(env or {}), max_restarts=max_restarts, launcher=launcher, cpus=tuple(cpus),
            gpus=tuple(gpus), on_failure=on_failure,
        )  # fmt: skip
        file = Path(tokenizer if tokenizer is not None else model or "-")
        file = file / "tokenizer.json" if file.suffix != ".json" else file
        self.tokenizer = str(file) if file.is_file() else ""
        if tokenizer is not None and not self.tokenizer:
            raise ConfigError(f"there is no tokenizer at {file}")

    def declare(self) -> TaskSpec:
        """The task: text prompts are encoded, and responses decoded, where there is a tokenizer."""
        gives: tuple[str, ...] = RESPONSE_COLUMNS
        if self.prompt != "prompt_ids":
            if not self.tokenizer:
                raise ConfigError(
                    f"prompts are text (column {self.prompt!r}), but {self.model or 'the model'!r} has no"
                    " tokenizer.json; name a tokenizer, or give token ids in a column prompt_ids"
                )
            gives = ("prompt_ids", *gives)
        if self.tokenizer:
            gives = (*gives, "response")
        return TaskSpec(name=self.task, needs=(self.prompt,), gives=gives, admits=True, lease_s=self.lease_s)


class Stage:
    """A step between rollout and training: ``function`` is called with the columns it needs, by name, a batch
    at a time, and returns one value a row (or a dict of columns, for several ``gives``).

    A function that another process can import runs in a process of its own; any other (a lambda, one from
    ``__main__`` or a notebook) runs in a thread of the driver.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        task: str | None = None,
        needs: Sequence[str] | None = None,
        gives: Sequence[str] | None = None,
        batch: int = 256,
        python: str | None = None,
        env: Mapping[str, str] | None = None,
        max_restarts: int = 3,
        launcher: str = "process",
        cpus: Sequence[int] = (),
        gpus: Sequence[int] = (),
        on_failure: OnFailure | None = None,
        lease_s: float = 3600.0,
    ) -> None:
        if not callable(function):
            raise ConfigError(f"a stage needs a function, not {function!r}")
        self.function = function
        name = getattr(function, "__name__", "stage").strip("<>")
        self.task = task or name
        self.needs = tuple(needs) if needs is not None else _parameters(function)
        self.gives = tuple(gives) if gives is not None else (self.task,)
        self.batch, self.lease_s = batch, lease_s
        self.place = Place(
            python=python, env=dict(env or {}), max_restarts=max_restarts, launcher=launcher, cpus=tuple(cpus),
            gpus=tuple(gpus), on_failure=on_failure,
        )  # fmt: skip
        if not self.needs:
            raise ConfigError(
                f"stage {self.task!r} needs no column; name its parameters after columns, or say needs="
            )

    def declare(self) -> TaskSpec:
        return TaskSpec(name=self.task, needs=self.needs, gives=self.gives, lease_s=self.lease_s)


class Train:
    """Trains with the train engine ``engine``, found through the hook. ``weights``: how each version is published; in a workflow
    that is the workflow's. ``options`` are the engine's own."""

    task = "train"

    def __init__(
        self,
        engine: str,
        *,
        model: str | Path = "",
        algorithm: Any = None,
        python: str | None = None,
        env: Mapping[str, str] | None = None,
        max_restarts: int = 0,
        launcher: str = "process",
        cpus: Sequence[int] = (),
        gpus: Sequence[int] = (),
        on_failure: OnFailure | None = None,
        weights: Weights | None = None,
        **options: Any,
    ) -> None:
        self.engine, self.model, self.options = engine, str(model), _plain(engine, options)
        self.weights = weights
        self.algorithm = algorithm if algorithm is not None else GRPO()
        self.place = Place(
            python=python, env=dict(env or {}), max_restarts=max_restarts, launcher=launcher, cpus=tuple(cpus),
            gpus=tuple(gpus), on_failure=on_failure,
        )  # fmt: skip

    def declare(self, batch_rows: int) -> TaskSpec:
        return TaskSpec(name=self.task, needs=TRAIN_COLUMNS, batch_rows=batch_rows, lease_s=86400.0)


def _plain(engine: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options travel to the worker as JSON: paths become text, and what does not fit is named."""
    for name, value in options.items():
        try:
            options[name] = msgspec.json.decode(msgspec.json.encode(value, enc_hook=_path))
        except TypeError as error:
            raise ConfigError(f"engine {engine!r}, option {name!r}: options travel as JSON, and {error}") from None
    return options


def _path(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a {type(value).__name__} has no such form")


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """The columns a function asks for by the names of its parameters."""
    import inspect

    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(
        p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.default is p.empty
    )
