"""Parts of the adapter for SGLang without SGLang: ends of responses, kept ids, refused masks."""

from __future__ import annotations

import pytest

import asyncflow_sdk as af
from asyncflow_sdk.errors import EngineError
from asyncflow_sdk.interfaces import Capabilities
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

    got = completion(reply, 0, {7, 9}, None, interrupted=True, watch=None)

    assert (got.finish_reason, got.token_ids.tolist()) == (reason, [5, last])


def masked(kept: list[list[int]], reason: str = "length", scored: int = 2) -> SGLangReply:
    """Two tokens, the first ones with kept ids."""
    meta = Meta(Reason(reason), [(-9.0, 5, None), (-9.0, 6, None)][:scored], kept, [-0.5, -0.25][: len(kept)])
    meta.weight_versions = [TokenSpan("3", 0, 2)]
    return SGLangReply(meta, [5, 6])


def test_kept_ids_come_as_columns_with_log_probs_over_them() -> None:
    got = completion(masked([[5], [6, 8]]), 0, set(), True, interrupted=False, watch=None)

    assert {name: column.tolist() for name, column in got.columns.items()} == {
        "kept_ids": [5, 6, 8], "kept_ids_counts": [1, 2],
    }  # fmt: skip
    assert got.logprobs.tolist() == [-0.5, -0.25]


def test_kept_ids_that_are_missing_end_an_interrupted_response_sooner_and_any_other_with_an_error() -> None:
    got = completion(masked([[5]], "abort"), 0, set(), True, interrupted=True, watch=None)
    assert (got.token_ids.tolist(), got.columns["kept_ids"].tolist()) == ([5], [5])

    with pytest.raises(EngineError, match="2 tokens with 1 log-probs or kept ids"):
        completion(masked([[5]]), 0, set(), True, interrupted=False, watch=None)


def test_a_draw_without_a_cut_has_counts_of_zero() -> None:
    got = completion(masked([]), 0, set(), False, interrupted=False, watch=None)
    assert (got.columns["kept_ids"].size, got.columns["kept_ids_counts"].tolist()) == (0, [0, 0])


@pytest.mark.parametrize(
    ("cut", "fits"),
    [({"top_p": 0.9}, False), ({"top_k": 4097}, False), ({"top_k": 4096, "top_p": 0.9}, True), ({}, True)],
)
def test_a_mask_of_a_large_vocabulary_needs_a_top_k(cut: dict[str, float], fits: bool) -> None:
    can = Capabilities(sampling_mask=True, most_kept=4096)
    sampling = af.Sampling(sampling_mask=True, **cut)  # type: ignore[arg-type]
    if fits:
        can.check("SGLangServer", sampling)
    else:
        with pytest.raises(af.ConfigError, match="only with a top_k of 1 to 4096"):
            can.check("SGLangServer", sampling)
