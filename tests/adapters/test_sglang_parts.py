"""What of the adapter for SGLang works without SGLang: the reason for a response's end."""

from __future__ import annotations

import pytest

from asyncflow_sglang.replies import Meta, Reason, SGLangReply, TokenSpan, completion

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("said", "last", "reason"),
    [
        ("stop", 7, "stop"),
        ("length", 7, "stop"),
        ("abort", 7, "stop"),
        ("length", 5, "length"),
        ("abort", 5, "aborted"),
    ],
)
def test_a_response_that_comes_to_a_stop_token_ends_for_it(said: str, last: int, reason: str) -> None:
    """SGLang names the length, or the abort, when the token comes with the last of max_tokens or as it aborts."""
    scored = [(-1.0, 5, None), (-0.5, last, None)]
    reply = SGLangReply(Meta(Reason(said), scored, weight_versions=[TokenSpan("3", 0, 2)]), [5, last])

    got = completion(reply, 0, {7, 9}, interrupted=True, watch=None)

    assert (got.finish_reason, got.token_ids.tolist()) == (reason, [5, last])
