"""Probe: a few sequences and their log-probs under a version, by which an engine that has loaded it can be found out."""

from __future__ import annotations

import msgspec


class Probe(msgspec.Struct, frozen=True, array_like=True):
    """``prompt_ids`` and ``response_ids``: token ids of each sequence. ``logprobs``: natural log of each response token under
    the version, by the trainer; empty before it has computed them. ``tolerance``: the largest absolute difference that is
    none (1e-3 is right for float32; bfloat16 wants some 5e-2)."""

    prompt_ids: tuple[tuple[int, ...], ...]
    response_ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...] = ()
    tolerance: float = 1e-3
