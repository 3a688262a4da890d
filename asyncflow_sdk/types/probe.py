"""Probe: a few sequences with log-probs under a version, to verify an engine that loaded it."""

from __future__ import annotations

from typing import Any

import msgspec

from ..errors import ConfigError


class Probe(msgspec.Struct, frozen=True, array_like=True):
    """``prompt_ids`` and ``response_ids``: token ids of each sequence. ``logprobs``: natural
    log-prob of each response token, computed by the trainer; empty until then. ``tolerance``:
    largest accepted absolute difference; use 1e-3 for float32 and about 5e-2 for bfloat16."""

    prompt_ids: tuple[tuple[int, ...], ...]
    response_ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...] = ()
    tolerance: float = 1e-3


def validate_probe(probe: Any, *, scored: bool) -> Probe:
    """Return the probe with arrays converted to plain numbers. Raises ConfigError for an invalid
    probe. ``scored``: require log-probs."""
    if not isinstance(probe, Probe):
        raise ConfigError(
            f"a probe must be an af.Probe(prompt_ids, response_ids, logprobs), not {type(probe).__name__}"
        )
    try:
        plain = msgspec.convert(msgspec.to_builtins(probe, enc_hook=_listed), Probe)
    except (TypeError, ValueError, RecursionError) as error:
        text = str(error).replace("$[0]", "prompt_ids").replace("$[1]", "response_ids").replace("$[2]", "logprobs")
        raise ConfigError(f"the probe must be lists of token ids and log-probs: {text}") from None
    prompts, responses = plain.prompt_ids, plain.response_ids
    if not prompts or len(prompts) != len(responses):
        raise ConfigError(
            f"a probe needs at least one prompt, and as many responses, not {len(prompts)} and {len(responses)}"
        )
    for number, pair in enumerate(zip(prompts, responses, strict=True)):
        if not all(pair):
            raise ConfigError(f"sequence {number} of the probe has no prompt or no response")
    given, wanted = [len(row) for row in plain.logprobs], [len(row) for row in responses]
    if given != wanted and (given or scored):
        raise ConfigError(
            f"the probe has responses of {wanted} tokens and log-probs of {given}: one a token is expected"
        )
    if not plain.tolerance >= 0:
        raise ConfigError(f"the probe's tolerance must be 0 or more, not {plain.tolerance}")
    return plain


def _listed(value: Any) -> Any:
    """Convert numbers and arrays of numpy and torch."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not a number")
