"""Checks of a publisher's arguments: the number of a version, and its weights."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..errors import ConfigError

_MAX_VERSION = (1 << 63) - 1
_STABLE = {dict, OrderedDict, list, tuple, type({}.items()), type(OrderedDict().items())}
"""Exact types only: a subclass may create tensors while it is iterated."""


def version_number(version: Any) -> int:
    """Return ``version`` as an int. Raises ConfigError unless it is a whole number of 0 or more."""
    try:
        number = -1 if isinstance(version, bool) else operator.index(version)
    except TypeError:
        number = -1
    if not 0 <= number <= _MAX_VERSION:
        raise ConfigError(f"the number of a version is an int of 0 or more, not {version!r}")
    return number


def is_stable(weights: Any) -> bool:
    """True if all tensors exist already, and none is created or refilled during the iteration."""
    return type(weights) in _STABLE


def iterate_pairs(version: int, weights: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor). No tensor is referenced here while the next is requested. Raises
    ConfigError for values that are neither a mapping nor pairs."""
    found = weights.items() if isinstance(weights, Mapping) else weights
    if not isinstance(found, Iterable) or isinstance(found, (str, bytes)):
        raise ConfigError(f"version {version}: {_WANTED}, not {_describe(weights)}")
    return _checked(version, iter(found))


def _checked(version: int, found: Iterator[Any]) -> Iterator[tuple[str, Any]]:
    number = 0
    for item in found:
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise ConfigError(f"version {version}: {_WANTED}; item {number} is {_describe(item)}")
        yield item[0], item[1]
        del item
        number += 1  # noqa: SIM113 (enumerate keeps a reference)


def _describe(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"{value!r}"[:80] if isinstance(value, str) else f"a {type(value).__name__}"


_WANTED = "weights are a mapping of names to tensors, such as a state_dict(), or an iterable of such pairs"
