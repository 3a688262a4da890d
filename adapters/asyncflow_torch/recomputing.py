"""Recomputing: what is within a layer of a model is computed again for the backward pass, and not kept (activation checkpointing)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def compute_again(model: Any) -> None:
    """In each layer, in place."""
    for layer in layers_of(model):
        # Not a wrapper around the layer, which would change the names of its weights. No random state: dropout is off.
        forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        layer.forward = functools.wraps(layer.forward)(forward)


def layers_of(model: Any) -> Iterator[Any]:
    """What transformers says must not be divided: the blocks of a model; of a model that says nothing, the modules of its longest list."""
    names = set(model._no_split_modules or ())
    found = [module for module in model.modules() if type(module).__name__ in names]
    if not found:
        lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
        found = list(max(lists, key=len, default=()))
    yield from found
