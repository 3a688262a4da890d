"""Answers of SGLang, and the responses in them."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

import msgspec
import numpy as np

from asyncflow_sdk.errors import EngineError
from asyncflow_sdk.interfaces import Completion, StopWatch
from asyncflow_sdk.interfaces.rollout import SAMPLING_MASK
from asyncflow_sdk.types import VersionSpan

Scored = tuple[float | None, int, Any]
"""Log-prob, token, text."""


class Reason(msgspec.Struct):
    """Reason for a response's end: stop, length or abort."""

    type: str
    message: str = ""


class TokenSpan(msgspec.Struct):
    """Version of the tokens ``start`` to ``end``."""

    version: str
    start: int
    end: int


class Meta(msgspec.Struct):
    """``cached_tokens``: prompt tokens found in the KV cache. ``output_token_sampling_mask``: kept ids of each
    draw, with the log-prob of the drawn one over them in ``output_token_sampling_logprobs``."""

    finish_reason: Reason | None = None
    output_token_logprobs: list[Scored] | None = None
    output_token_sampling_mask: list[list[int]] | None = None
    output_token_sampling_logprobs: list[float] | None = None
    input_token_logprobs: list[Scored] | None = None
    weight_versions: list[TokenSpan] | None = None
    cached_tokens: int = 0


class SGLangReply(msgspec.Struct):
    """Answer of /generate."""

    meta_info: Meta
    output_ids: list[int]


NOTHING = SGLangReply(Meta(Reason("abort", "before it began")), [])
"""Answer of a request aborted before it was sent."""


def completion(
    reply: SGLangReply,
    index: int,
    ends: Collection[int],
    masked: bool | None,
    interrupted: bool,
    watch: StopWatch | None,
) -> Completion:
    """Return the response in a reply. ``ends``: end and stop tokens; SGLang looks first at the
    length and for an abort. ``masked``: the draws have kept ids; None: it has no columns for them. ``watch``:
    finds its stop text, for which it was aborted. Raises EngineError for a response aborted by others, and for
    tokens without log-probs, kept ids or a known version."""
    reason, meta = reply.meta_info.finish_reason, reply.meta_info
    scored = meta.output_token_logprobs or []
    tokens = len(scored)
    stopped = watch is not None and watch.found(reply.output_ids[:tokens])
    if reason is None or (reason.type == "abort" and not (interrupted or stopped)) or reason.type not in _REASONS:
        given = "no reason" if reason is None else f"{reason.type!r} {reason.message}"
        raise EngineError(f"SGLang ended a response that nobody interrupted, with {given}")
    kept, over_kept = meta.output_token_sampling_mask or [], meta.output_token_sampling_logprobs or []
    has = {len(reply.output_ids), tokens, *((len(kept), len(over_kept)) if masked else ())}
    if reason.type == "abort":  # a response waiting to be recomputed may have fewer log-probs than tokens
        tokens = min(has)
    elif len(has) > 1:
        raise EngineError(f"SGLang returned {len(reply.output_ids)} tokens with {min(has)} log-probs or kept ids")
    ids = reply.output_ids[:tokens]
    if ids != [token for _, token, _ in scored[:tokens]] or any(value is None for value, _, _ in scored[:tokens]):
        raise EngineError("SGLang returned log-probs of other tokens than the returned ones")
    logprobs = np.array(over_kept[:tokens] if masked else [value for value, _, _ in scored[:tokens]], np.float32)
    columns = {}
    if masked is not None:
        cut = kept[:tokens] if masked else [[]] * tokens
        values = [list(itertools.chain.from_iterable(cut)), list(map(len, cut))]
        columns = {name: np.array(each, np.int32) for name, each in zip(SAMPLING_MASK, values, strict=True)}
    spans = _spans(meta.weight_versions or [], tokens)
    ended = "stop" if stopped or (tokens and ids[-1] in ends) else _REASONS[reason.type]
    return Completion(index, np.array(ids, np.int32), logprobs, ended, spans, columns)


_REASONS = {"stop": "stop", "length": "length", "abort": "aborted"}


def _spans(given: list[TokenSpan], tokens: int) -> tuple[VersionSpan, ...]:
    try:
        spans = [VersionSpan(int(span.version), span.start, min(span.end, tokens)) for span in given]
    except ValueError:
        raise EngineError(
            f"SGLang names its weights {[span.version for span in given]}, and no run published them: the server was"
            " restarted, or others update it"
        ) from None
    spans = [span for span in spans if span.start < span.end]
    if (spans[-1].end if spans else 0) != tokens:
        raise EngineError(f"SGLang returned versions {spans} for {tokens} tokens")
    return tuple(spans)


def scores(reply: SGLangReply, response: list[int], vocabulary: int) -> list[float]:
    """Return the log-probs of ``response``, the end of the scored sequence. Raises EngineError
    for log-probs of other tokens."""
    scored = (reply.meta_info.input_token_logprobs or [])[-len(response) :] if response else []
    values = [value for value, _, _ in scored if value is not None]
    # SGLang scores the last token of the vocabulary correctly and labels it 0.
    labels = [0 if token == vocabulary - 1 else token for token in response]
    found = [0 if token == vocabulary - 1 else token for _, token, _ in scored]
    if found != labels or len(values) != len(response):
        raise EngineError("SGLang returned log-probs of other tokens than the scored ones")
    return values
