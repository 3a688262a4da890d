"""Cache of rows that decode together: keys and values, and the states of recurrent layers. It grows
in place, drops rows, and joins with another.

The cache of transformers copies all keys and values for each new token (torch.cat); this one writes
them into spare room: a tenth less time for 256 rows of 100 tokens of the demo model. Joining gains
more: requests arriving one by one decode four times as fast in one batch as alone.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from asyncflow_sdk.errors import ConfigError

_PADDED = {"GrowingLayer", "DummyLayer", "DynamicSlidingWindowLayer"}
"""Layers for prompts with padding. The state of another layer would contain it."""
_JOINED = {"GrowingLayer", "DummyLayer", "LinearAttentionLayer"}
"""Layers that join with rows of another length."""


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer, each (rows, heads, tokens, head size), as views of larger
    buffers."""

    # Hazard: a subclass that inherits a layer type replaces its parent in every cache transformers makes.
    _layer_type = None

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._rooms: list[Any] = []

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Append tokens; returns views of all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        start = self.keys.shape[-2]
        end = start + key_states.shape[-2]
        if not self._rooms or end > self._rooms[0].shape[-2]:
            self._rooms = [_with_room(self.keys, end), _with_room(self.values, end)]
        for room, new in zip(self._rooms, (key_states, value_states), strict=True):
            room[:, :, start:end] = new
        self.keys, self.values = (room[:, :, :end] for room in self._rooms)
        return self.keys, self.values

    def keep(self, rows: Any, cut: int) -> None:
        """Keep ``rows`` in this order (repeats allowed), without their first ``cut`` tokens."""
        self._rooms = []
        self.keys, self.values = (states[:, :, cut:].index_select(0, rows) for states in (self.keys, self.values))

    def rearrange(self, columns: Any) -> None:
        """Keep the tokens ``columns`` (int64 (rows, tokens)) of each row, in this order."""
        self._rooms, index = [], columns[:, None, :, None]
        self.keys, self.values = (
            states.gather(2, index.expand(-1, states.shape[1], -1, states.shape[3]))
            for states in (self.keys, self.values)
        )

    def join(self, other: GrowingLayer) -> None:
        """Append the rows of ``other``; the narrower of the two is padded on the left."""
        width = max(self.keys.shape[-2], other.keys.shape[-2])
        self._rooms = [
            _stacked(self.keys, other.keys, width),
            _stacked(self.values, other.values, width),
        ]
        self.keys, self.values = (room[:, :, :width] for room in self._rooms)


def new_cache(model: Any) -> Any:
    """Return an empty cache for ``model``. Layers other than plain attention are transformers' own."""
    cache = DynamicCache(config=model.config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def checked_cache(model: Any) -> Any:
    """Return a cache with one token. Raises ConfigError if ``model`` keeps the state of a layer
    elsewhere."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    try:
        cache = new_cache(model)
        read(model, cache, token, None, token)
        empty = [n for n, layer in enumerate(cache.layers) if not _holds(layer)]
        problem = f"its layers {empty} do not use the cache" if empty else ""
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        raise ConfigError(
            f"engine 'transformers' cannot keep the state of {type(model).__name__} ({problem}); use vllm or sglang"
        )
    return cache


def read(model: Any, cache: Any, ids: Any, mask: Any, positions: Any) -> Any:
    """Read tokens into the cache, ``ids`` and ``positions`` int64 (rows, tokens). Return the logits
    (rows, vocabulary) after the last one."""
    # transformers 5.24 renamed the argument.
    name = "cache" if "cache" in _parameters(type(model).forward) else "past_key_values"
    output = model(
        input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1, **{name: cache}
    )
    return output.logits[:, -1]


def padded(cache: Any) -> bool:
    """True if prompts of different lengths can be read in one pass."""
    return all(type(layer).__name__ in _PADDED for layer in cache.layers)


def joinable(cache: Any) -> bool:
    """True if rows of this cache can be trimmed, and joined with rows of another length."""
    return all(type(layer).__name__ in _JOINED for layer in cache.layers)


def width(cache: Any) -> int:
    """Return the number of tokens in a joinable cache, padding included; 0 without attention."""
    return next((layer.get_seq_length() for layer in cache.layers if isinstance(layer, GrowingLayer)), 0)


def keep(cache: Any, rows: Any, cut: int) -> None:
    """Keep ``rows`` (int64, repeats allowed), in this order, without their first ``cut`` tokens;
    ``cut`` > 0 needs a joinable cache."""
    for layer in cache.layers:
        if isinstance(layer, GrowingLayer):
            layer.keep(rows, cut)
        else:
            layer.reorder_cache(rows)


def join(cache: Any, other: Any) -> None:
    """Append the rows of ``other``. Both must be joinable."""
    for mine, its in zip(cache.layers, other.layers, strict=True):
        if isinstance(mine, GrowingLayer):
            mine.join(its)
        for states, others in zip(_states(mine), _states(its), strict=True):
            states |= {key: torch.cat([state, others[key]]) for key, state in states.items() if state is not None}


def rearrange(cache: Any, columns: Any) -> None:
    """Keep the tokens ``columns`` (int64 (rows, tokens)) of each row, in this order. For caches of
    plain attention."""
    for layer in cache.layers:
        if isinstance(layer, GrowingLayer):
            layer.rearrange(columns)


def _capacity(tokens: int) -> int:
    return tokens + max(8, tokens // 2)


def _with_room(states: Any, tokens: int) -> Any:
    rows, heads, width, size = states.shape
    room = states.new_empty(rows, heads, _capacity(tokens), size)
    room[:, :, :width] = states
    return room


def _stacked(upper: Any, lower: Any, width: int) -> Any:
    rows, heads, _, size = upper.shape
    # Hazard: padding must be zero. Attention gives it weight 0, and 0 times an uninitialised NaN is NaN.
    room = upper.new_zeros(rows + lower.shape[0], heads, _capacity(width), size)
    room[:rows, :, width - upper.shape[-2] : width] = upper
    room[rows:, :, width - lower.shape[-2] : width] = lower
    return room


def _states(layer: Any) -> list[dict[int, Any]]:
    """Return the states of a recurrent or convolutional layer, by their kind and number."""
    return [getattr(layer, kind) for kind in ("conv_states", "recurrent_states") if hasattr(layer, kind)]


def _holds(layer: Any) -> bool:
    held = [state is not None for states in _states(layer) for state in states.values()]
    return any(held) or getattr(layer, "is_initialized", False)


@functools.lru_cache
def _parameters(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)
