"""Work of a stage by an engine with fixed weights, and checks of functions and engine options.

af.Stage(af.Logprobs("torch", model=reference), gives=["ref_logprobs"])
af.Stage(af.Logprobs("fsdp", model=large, world_size=4), gives=["ref_logprobs"], gpus=range(4))
af.Stage(af.Generate("transformers", model=judge, sampling=af.Sampling(temperature=0)),
needs=["question"], gives=["verdict"])
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from ..errors import ConfigError
from ..plugins import import_path
from ..types import Chat, Sampling
from ..types.dtypes import floating_name
from ..types.validation import check_least
from .model_folder import model_folder, stored_dtype, text_config
from .serialization import Serializable

TRL_COLUMNS = {"prompts": "prompt", "completions": "response", "completion_ids": "response_ids"}
"""Columns by the names of TRL's reward functions."""


class EngineSpec(Serializable):
    """A part of a workflow with an engine and its model. Its constructor uses no network: a name of the hub stays in
    ``model`` until ``find_model``."""

    def _take_engine(
        self,
        engine: str | type,
        options: dict[str, Any],
        model: str | Path,
        revision: str | None,
        tokenizer: str | Path | None = None,
    ) -> None:
        tokenizer_file(tokenizer, "")
        self.engine, self._tokenizer = engine_name(engine), tokenizer
        self.options = plain_options(self.engine, options)
        self.init_args |= {"engine": self.engine, **self.options}
        self.take_model(str(model), revision)

    def find_model(self) -> None:
        """Make ``model`` a folder of this host: a model of the hub is downloaded. Raises ConfigError, PluginError."""
        self.take_model(model_folder(self.model, self.model_revision))

    def take_model(self, model: str, revision: str | None = None) -> None:
        """Set the model: a folder, or a name of the hub at ``revision``."""
        self.model, self.model_revision = model, revision
        self.init_args |= {"model": model, "model_revision": revision}

    @property
    def tokenizer(self) -> str:
        """The path of the named tokenizer.json, or of the model's; "" without one."""
        return tokenizer_file(self._tokenizer, self.model)

    @property
    def config(self) -> dict[str, Any]:
        """The configuration of the model folder, with the fields of the language model of a multimodal one; empty if
        it cannot be read."""
        try:
            config = msgspec.json.decode(Path(self.model or "-", "config.json").read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.MsgspecError):
            return {}
        return text_config(config)

    def dtype_of(self, option: str) -> str:
        """Return the dtype that an engine's option means, for "auto" the model folder's; "" if unknown here."""
        return floating_name(option) if option != "auto" else stored_dtype(self.model or "-")


class Logprobs(EngineSpec):
    """Log-probs of given responses by the train engine ``engine`` with the fixed weights of ``model``, a folder or a
    model of the hub as of ``Rollout``: of a reference or a teacher.

    Its stage needs the columns of prompt and response, both token ids (default "prompt_ids", "response_ids"), and
    gives one ragged float32 column, one number a response token. ``options``: of the engine.

    ``world_size``: number of processes (ranks) that share the weights and the rows, if the engine shards weights.
    Placement, restarts and connections of the ranks are those of ``Train``'s."""

    kind: Literal["train"] = "train"
    needs = ("prompt_ids", "response_ids")

    def __init__(
        self,
        engine: str | type,
        *,
        model: str | Path = "",
        model_revision: str | None = None,
        world_size: int = 1,
        **options: Any,
    ) -> None:
        check_least(1, world_size=world_size)
        self._take_engine(engine, options, model, model_revision)
        self.world_size = world_size


class Generate(EngineSpec):
    """One response to each row by the rollout engine ``engine`` with the fixed weights of ``model``, a folder or a
    model of the hub as of ``Rollout``: of a judge or a teacher.

    Its stage needs one column of prompts, texts, chats or token ids, and gives one column: text with a tokenizer,
    else the response's token ids. ``tokenizer``: a folder or tokenizer.json; default: the model's. ``chat``: as of
    ``Rollout``. ``options``: of the engine."""

    kind: Literal["rollout"] = "rollout"

    def __init__(
        self,
        engine: str | type,
        *,
        model: str | Path = "",
        model_revision: str | None = None,
        sampling: Sampling | None = None,
        tokenizer: str | Path | None = None,
        chat: Chat | None = None,
        **options: Any,
    ) -> None:
        self._take_engine(engine, options, model, model_revision, tokenizer)
        if chat is not None and isinstance(chat.tools, str):
            raise ConfigError("Generate needs one column, the prompts: give the schemas of tools, tools=[...]")
        self.sampling, self.chat = sampling or Sampling(), chat


def engine_name(engine: str | type) -> str:
    """Return an engine's registered name, or "module:Class" of an unregistered class. Raises ConfigError for a class
    that a worker cannot import."""
    if isinstance(engine, str):
        return engine
    path = import_path(engine)
    if path is None:
        raise ConfigError(
            f"engine {engine!r} cannot be imported by its worker: put the class into a module of its own, and name it"
            ' by that ("module:Class")'
        )
    return path


def tokenizer_file(tokenizer: str | Path | None, model: str | Path) -> str:
    """Return the path of the named tokenizer.json, or of the model's; "" if the model has none. Raises ConfigError if
    the named one is missing."""
    file = Path(tokenizer if tokenizer is not None else model or "-")
    file = file / "tokenizer.json" if file.suffix != ".json" else file
    if tokenizer is not None and not file.is_file():
        raise ConfigError(f"there is no tokenizer at {file}{without_fast_file(file.parent)}")
    return str(file) if file.is_file() else ""


def without_fast_file(folder: str | Path) -> str:
    """Return the remedy for a folder with a tokenizer of another format than tokenizer.json; "" for any other."""
    files = ("tokenizer_config.json", "vocab.json", "tokenizer.model", "spiece.model", "vocab.txt")
    if not any(Path(folder, file).is_file() for file in files):
        return ""
    return (
        f"; {str(folder)!r} has one of another format:"
        f" transformers.AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r}) makes this file"
    )


def plain_options(engine: str, options: dict[str, Any]) -> dict[str, Any]:
    """Convert engine options to JSON types, paths to text. Raises ConfigError with the name of an option without a
    JSON form."""
    for name, value in options.items():
        try:
            if not _is_finite(value):
                raise TypeError(f"{value!r:.80} has no such form")
            options[name] = msgspec.json.decode(msgspec.json.encode(value, enc_hook=_path))
        except (TypeError, UnicodeEncodeError) as error:
            raise ConfigError(f"engine {engine!r}, option {name!r}: options travel as JSON, and {error}") from None
    return options


def _is_finite(value: Any) -> bool:
    """True if all numbers in a value are finite: JSON turns others into null."""
    if isinstance(value, (Mapping, list, tuple, set, frozenset)):
        return all(map(_is_finite, value.values() if isinstance(value, Mapping) else value))
    return not isinstance(value, float) or math.isfinite(value)


def _path(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a {type(value).__name__} has no such form")


def parameters_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a function's parameters without a default: the columns it needs."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(
        p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.default is p.empty
    )


def needs_of(work: Any) -> tuple[str, ...]:
    """Return the columns declared by a stage's work, or else its parameters, without TRL's names."""
    declared = getattr(plain_function(work), "needs", None)
    if declared is not None:
        return tuple(declared)
    names = TRL_COLUMNS if takes_all(work) else {}
    return tuple(names.get(each, each) for each in parameters_of(work)) if callable(work) else ()


def takes_all(work: Any) -> bool:
    """True for a function with ``**columns``: it gets all columns of the data set, too."""
    if not callable(work) or hasattr(plain_function(work), "needs"):
        return False
    try:
        return any(each.kind is each.VAR_KEYWORD for each in inspect.signature(work).parameters.values())
    except (TypeError, ValueError):
        return False


def is_of_trl(function: Callable[..., Any]) -> bool:
    """True for a function with TRL's signature: (prompts, completions, **columns), or one of both."""
    return takes_all(function) and bool(TRL_COLUMNS.keys() & parameters_of(function))


def as_trl(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return columns as lists by TRL's names, and completions of chats as messages."""
    given = {name: values.tolist() if hasattr(values, "tolist") else values for name, values in columns.items()}
    if "response" in given and any(isinstance(prompt, list) for prompt in given.get("prompt", ())):
        given["response"] = [[{"role": "assistant", "content": text}] for text in given["response"]]
    return given | {name: given.pop(column) for name, column in TRL_COLUMNS.items() if column in given}


def is_coroutine(function: Callable[..., Any]) -> bool:
    """True if calls of ``function`` are awaited."""
    plain = plain_function(function)
    return inspect.iscoroutinefunction(plain) or inspect.iscoroutinefunction(type(plain).__call__)


def plain_function(function: Any) -> Any:
    """Return the function of a functools.partial, or any other object itself."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def full_name(function: Any) -> str:
    """Return a function's name for messages; for an object its class's."""
    plain = plain_function(function)
    return str(getattr(plain, "__qualname__", type(plain).__name__))


def short_name(function: Any) -> str:
    """Return a function's name for tasks and columns; for an object its class's in lower case."""
    plain = plain_function(function)
    return str(getattr(plain, "__name__", type(plain).__name__.lower())).strip("<>")
