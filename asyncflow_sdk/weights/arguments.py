"""What users give to a publisher, checked: the number of a version, and its weights."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..errors import ConfigError

_MOST = (1 << 63) - 1
_LASTING = {dict, OrderedDict, list, tuple, type({}.items()), type(OrderedDict().items())}
"""Not what is derived of them: that may do anything."""


def version_number(version: Any) -> int:
    """Raises ConfigError for what is no whole number of 0 or more."""
    try:
        number = -1 if isinstance(version, bool) else operator.index(version)
    except TypeError:
        number = -1
    if not 0 <= number <= _MOST:
        raise ConfigError(f"the number of a version is an int of 0 or more, not {version!r}")
    return number


def lasts(weights: Any) -> bool:
    """Whether all tensors are there already, and none is made, or filled anew, as it is asked for."""
    return type(weights) in _LASTING


def pairs(version: int, weights: Any) -> Iterator[tuple[str, Any]]:
    """Name and tensor of each, as they come; none is held here while the next is asked for. Raises ConfigError for what is neither
    a mapping nor gives pairs."""
    found = weights.items() if isinstance(weights, Mapping) else weights
    if not isinstance(found, Iterable) or isinstance(found, (str, bytes)):
        raise ConfigError(f"version {version}: {_WANTED}, not {_shown(weights)}")
    return _each(version, iter(found))


def _each(version: int, found: Iterator[Any]) -> Iterator[tuple[str, Any]]:
    number = 0
    for item in found:
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise ConfigError(f"version {version}: {_WANTED}; item {number} is {_shown(item)}")
        yield item[0], item[1]
        del item
        number += 1  # noqa: SIM113 (enumerate holds on to what it gave)


def _shown(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"{value!r}"[:80] if isinstance(value, str) else f"a {type(value).__name__}"


_WANTED = "weights are a mapping of names to tensors, such as a state_dict(), or an iterable of such pairs"
