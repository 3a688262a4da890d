"""Activation checkpointing: activations inside a layer are recomputed in the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def recompute_activations(model: Any) -> None:
    """Recompute activations inside each layer of ``model``, in place."""
    for layer in layers_of(model):
        # No wrapper module: it would rename the weights. No random state: dropout is off.
        forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        layer.forward = functools.wraps(layer.forward)(forward)


def layers_of(model: Any) -> Iterator[Any]:
    """Yield the blocks of a model, named by transformers as not to be split, without blocks inside them (Mamba names
    both); without names, the modules of its longest list."""
    names = set(model._no_split_modules or ())
    found = [module for module in model.modules() if type(module).__name__ in names]
    if not found:
        lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
        found = list(max(lists, key=len, default=()))
    inner = {id(each) for module in found for each in module.modules() if each is not module}
    yield from (module for module in found if id(module) not in inner)
