"""What an SGLang server answers, and the responses in it."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from asyncflow_sdk.errors import EngineError
from asyncflow_sdk.interfaces import Completion
from asyncflow_sdk.types import VersionSpan

Scored = tuple[float | None, int, Any]
"""Log-prob, token, text."""


class Reason(msgspec.Struct):
    """Why a response ended: stop, length or abort."""

    type: str
    message: str = ""


class Span(msgspec.Struct):
    """Tokens ``start`` to ``end`` are of this version."""

    version: str
    start: int
    end: int


class Meta(msgspec.Struct):
    """``cached_tokens``: of the prompt, whose keys and values were there already."""

    finish_reason: Reason | None = None
    output_token_logprobs: list[Scored] | None = None
    input_token_logprobs: list[Scored] | None = None
    weight_versions: list[Span] | None = None
    cached_tokens: int = 0


class Reply(msgspec.Struct):
    """Of /generate."""

    meta_info: Meta
    output_ids: list[int]


NOTHING = Reply(Meta(Reason("abort", "before it began")), [])
"""Of a request that was ended before the server heard of it."""


def completion(reply: Reply, index: int, *, interrupted: bool) -> Completion:
    """The response in a reply. Raises EngineError for one that was ended and not by ``interrupt``, and for what is no response:
    tokens without log-probs, or of no known version."""
    reason, meta = reply.meta_info.finish_reason, reply.meta_info
    if reason is None or (reason.type == "abort" and not interrupted) or reason.type not in _REASONS:
        said = "nothing of an end" if reason is None else f"{reason.type!r} {reason.message}"
        raise EngineError(f"SGLang ended a response that nobody interrupted; it says {said}")
    scored = meta.output_token_logprobs or []
    tokens = len(scored)
    if reason.type == "abort":  # of what waited to be read anew, log-probs may not have been told as far as tokens
        tokens = min(tokens, len(reply.output_ids))
    elif tokens != len(reply.output_ids):
        raise EngineError(f"SGLang gave {len(reply.output_ids)} tokens with {tokens} log-probs")
    ids = reply.output_ids[:tokens]
    if ids != [token for _, token, _ in scored[:tokens]] or any(value is None for value, _, _ in scored[:tokens]):
        raise EngineError("SGLang gave log-probs that are not those of the tokens it gave")
    logprobs = np.array([value for value, _, _ in scored[:tokens]], np.float32)
    spans = _spans(meta.weight_versions or [], tokens)
    return Completion(index, np.array(ids, np.int32), logprobs, _REASONS[reason.type], spans)


_REASONS = {"stop": "stop", "length": "length", "abort": "aborted"}


def _spans(told: list[Span], tokens: int) -> tuple[VersionSpan, ...]:
    try:
        spans = [VersionSpan(int(span.version), span.start, min(span.end, tokens)) for span in told]
    except ValueError:
        raise EngineError(
            f"SGLang names its weights {[span.version for span in told]}, which no run published: the server was started"
            " anew, or others update it"
        ) from None
    spans = [span for span in spans if span.start < span.end]
    if (spans[-1].end if spans else 0) != tokens:
        raise EngineError(f"SGLang gave versions {spans} for {tokens} tokens")
    return tuple(spans)


def scores(reply: Reply, response: list[int], vocabulary: int) -> list[float]:
    """Log-probs of ``response``, which ended what was read. Raises EngineError for those of other tokens."""
    scored = (reply.meta_info.input_token_logprobs or [])[-len(response) :] if response else []
    values = [value for value, _, _ in scored if value is not None]
    # SGLang scores the last token of the vocabulary rightly and calls it 0.
    called = [0 if token == vocabulary - 1 else token for token in response]
    told = [0 if token == vocabulary - 1 else token for _, token, _ in scored]
    if told != called or len(values) != len(response):
        raise EngineError("SGLang gave log-probs that are not those of the tokens it was asked for")
    return values
