"""Validation of constructor arguments against the annotations of their parameters.

check_types(Sampling, {"max_tokens": "8"})       # ConfigError: Sampling: max_tokens must be int, not str: '8'"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import itertools
import numbers
import re
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal

import numpy as np

from ..errors import ConfigError

Fits = Callable[[Any], bool]

MAX_CHECKED = 1000
"""Number of items checked in a list: long lists are data, validated by their consumers."""

_OTHER_NAMES = {
    "beta kl_coef kl_loss_coef": "kl=af.KL(coef=...) of the algorithm, with the stage"
    " af.Stage(af.Logprobs('torch', model=...), gives=['ref_logprobs'])",
    "lr": "learning_rate= of Train",
    "optim optimizer": "learning_rate=, betas= and weight_decay= of Train: the optimizer is AdamW",
    "epsilon epsilon_low epsilon_high": "clip_low= and clip_high= of the algorithm",
    "mask_truncated_completions": "overlong=af.Overlong(mask_truncated=True) of the algorithm",
    "loss_type": "another algorithm: af.GRPO(), af.DrGRPO(), af.DAPO(), ...",
    "scale_rewards": "normalize_std= of the algorithm",
    "algorithm": "algorithm= of Train",
    "num_iterations": "updates= of Train",
    "bf16 fp16": "dtype='bfloat16' of Train",
    "per_device_train_batch_size gradient_accumulation_steps": "batch_size= of Workflow: the rows of a step",
    "max_steps": "steps= of Workflow",
    "num_train_epochs": "epochs= of Workflow",
    "train_dataset dataset": "prompts= of Workflow",
    "eval_dataset eval_steps eval_strategy": "evaluate=af.Evaluation(prompts=..., every=...) of Workflow",
    "reward_funcs": "reward= of Workflow",
    "reward_weights": "reward=[(function, weight), ...] of Workflow",
    "report_to": "track= of Workflow",
    "resume_from_checkpoint": "checkpoint=af.Checkpoint(every=...) of Workflow, and `asyncflow resume DIRECTORY`",
    "use_vllm vllm_mode": "Rollout('vllm', ...)",
    "model": "model= of Rollout and of Train",
    "options option placement": "its names, each as a keyword argument",
    "num_generations group_size": "group_size= of Rollout",
    "max_completion_length max_new_tokens max_tokens": "sampling=af.Sampling(max_tokens=...) of Rollout",
    "temperature top_p top_k min_p repetition_penalty stop": "sampling=af.Sampling(...) of Rollout",
}
"""Names of TRL's options, and arguments given to another class: the place of each."""
_PLACES = {name: place for names, place in _OTHER_NAMES.items() for name in names.split()}
_LORA = re.compile("lora|peft|use_peft|enable_lora")


def hint(name: str, known: Collection[str]) -> str:
    """Return the name meant by an unknown name, in words, or "". Longer names precede: stop_ids for stop."""
    if _LORA.match(name):
        return "LoRA is not supported yet: all weights are trained"
    if name in _PLACES:
        return f"did you mean {_PLACES[name]}?"
    longer = [each for each in known if each.startswith(f"{name}_")]
    near = next(iter(longer or difflib.get_close_matches(name, known, 1)), "")
    return near and f"did you mean {near!r}?"


def place_of(made: Any, name: str, known: Collection[str]) -> str:
    """Return a hint for an unknown argument of ``made``: by its ``elsewhere``, the name meant, or all names."""
    elsewhere: Mapping[str, str] = getattr(made, "elsewhere", {})
    return elsewhere.get(name) or hint(name, known) or f"it takes: {', '.join(known) or 'none'}"


def check_keywords(made: type, given: Iterable[str]) -> None:
    """Raise TypeError with a suggestion for an unknown keyword argument, as Python 3.13 does."""
    parameters = inspect.signature(made).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return
    for name in given:
        if name not in parameters:
            raise TypeError(f"{made.__name__} has no argument {name!r}; {place_of(made, name, parameters)}")


class UserConfig:
    """Base of configuration dataclasses: an unknown keyword raises TypeError with a suggestion."""

    def __new__(cls, *args: Any, **given: Any) -> Any:
        check_keywords(cls, given)
        return super().__new__(cls)


def check_types(made: type, given: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument of another type than its parameter's annotation: numbers (numpy's too; a bool
    is none), text, bools, None, paths, functions, classes, lists and mappings of these. Other annotations pass."""
    fits = _fits(made)
    for name, value in given.items():
        found = fits.get(name)
        if found is not None and not found[0](value):
            raise ConfigError(f"{made.__name__}: {name} {unfit(found[1], value)}")


def unfit(words: str, value: Any) -> str:
    """Return the problem of a value of another type than described."""
    return f"must be {words}, not {type(value).__name__}: {value!r:.80}"


def check_fields(made: Any) -> None:
    """Call ``check_types`` for the fields of a dataclass instance."""
    check_types(type(made), vars(made))


def check_least(least: float, **given: float | None) -> None:
    """Raise ConfigError for a number below ``least``, or NaN. None passes: it was not given."""
    for name, value in given.items():
        if value is not None and not value >= least:
            raise ConfigError(f"{name} must be {least} or more, not {value}")


def check_above(bound: float, **given: float | None) -> None:
    """Raise ConfigError for a number not above ``bound``, or NaN. None passes: it was not given."""
    for name, value in given.items():
        if value is not None and not value > bound:
            raise ConfigError(f"{name} must be above {bound}, not {value}")


@functools.cache
def _fits(made: type) -> dict[str, tuple[Fits, str]]:
    """Return, by parameter, the predicate for its values and the description of its type."""
    of: Any = made
    try:
        hints = typing.get_type_hints(of if dataclasses.is_dataclass(made) else of.__init__)
    except NameError:  # in a user's subclass
        return {}
    names = inspect.signature(made).parameters
    return {name: kind_of(hint) for name, hint in hints.items() if name in names}


def kind_of(hint: Any) -> tuple[Fits, str]:
    """Return the predicate for values of a type, and its description in words."""
    origin, of = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, UnionType):
        kinds = [kind_of(each) for each in of]
        names = [words for each, (_, words) in zip(of, kinds, strict=True) if each is not NoneType]
        names += ["None"] if NoneType in of else []
        return lambda value: any(fit(value) for fit, _ in kinds), " or ".join(dict.fromkeys(names))
    if origin is Literal:
        types_of = tuple({type(each) for each in of})
        return lambda value: isinstance(value, types_of) and value in of, " or ".join(map(repr, of))
    if origin is Callable:
        return callable, "a function"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        (keys, key), (values, item) = map(kind_of, of)
        return (
            lambda value: isinstance(value, Mapping) and all(keys(k) and values(v) for k, v in value.items()),
            f"a mapping of {key} to {item}",
        )
    if isinstance(origin, type) and issubclass(origin, Collection):
        if origin is tuple and of[-1] is not ...:
            return lambda value: True, "a pair"
        each, item = kind_of(of[0])
        return (
            lambda value: (
                isinstance(value, Collection)
                and not isinstance(value, (str, bytes, Mapping))
                and all(map(each, itertools.islice(value, MAX_CHECKED)))
            ),
            f"a list of {item}",
        )
    name = "a class" if hint is type else "a path" if hint is Path else getattr(hint, "__name__", str(hint))
    if hint in PLAIN or not inspect.isclass(hint):
        return PLAIN.get(hint, lambda value: True), name
    return lambda value: isinstance(value, hint), name


def _is_instance(kinds: Any) -> Fits:
    return lambda value: isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


PLAIN: dict[Any, Fits] = {
    int: _is_instance((int, np.integer)),
    float: _is_instance((numbers.Real,)),
    bool: _is_instance((bool, np.bool_)),
    NoneType: lambda value: value is None,
    Any: lambda value: True,
    object: lambda value: True,
}
