"""Diagnosis: name the fault between the correct tokens or log-probs and the observed ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .policy import Logprobs, Policy

Ids = npt.NDArray[np.int32]
_BACK, _LOW_IDS, _MORE = 3, 3, 4
_CUT, _ROUNDED = 3.0, 0.15
"""Nats: no sampler keeps less than a twentieth of the probability; a log-prob in 16-bit
arithmetic is hardly further off."""
OTHER_VERSION = "weights: "
"""The prefix of causes for which a check may know a more specific one, for example a cache."""


CACHE = "load_weights: a prefix or KV cache of the old weights is kept"
CACHE_HINT = (
    "prefix or KV caches: empty them in load_weights(), after the last request under the old weights has ended"
)


class Diagnosis(NamedTuple):
    """``cause``: the fault, as "part: fault"; "" if unknown. ``text``: appended to the message.
    ``hint``: where to look."""

    cause: str = ""
    text: str = ""
    hint: str = ""

    def or_else(self, cause: str) -> str:
        """Return ``cause``, suspected by a check, unless the numbers show a more specific one."""
        return cause if cause and (not self.cause or self.cause.startswith(OTHER_VERSION)) else self.cause


def diagnose_tokens(policy: Policy, version: int, prompt: Ids, ids: Ids) -> Diagnosis:
    """Explain greedy tokens other than those of ``version`` after ``prompt``."""
    if not len(ids):
        return Diagnosis()
    for other in _versions(version):
        if np.array_equal(policy.greedy(other, prompt, len(ids)), ids):
            return Diagnosis(_stale(other, version), f": those are of version {other}", _LOADING)
    for changed, what, cause in _prompts(policy, prompt):
        if np.array_equal(policy.greedy(version, changed, len(ids)), ids):
            return Diagnosis(cause, f": that is the answer to the prompt {what}", _PROMPT)
    wanted = policy.greedy(version, prompt, len(ids) + _MORE)
    for length in range(1, len(wanted) + 1):
        again = policy.retokenised(wanted[:length])
        if again is not None and np.array_equal(again[: len(ids)], ids):
            text = ": those are what the right tokens become when they are decoded to text and encoded again"
            return Diagnosis("response: decoded to text and encoded again", text, _TEXT)
    if np.array_equal(ids, np.concatenate([prompt, wanted])[: len(ids)]):
        hint = "return the new tokens only: generate() of transformers returns the prompt with them"
        return Diagnosis("response: it begins with the prompt", ": the response begins with the prompt", hint)
    if len(ids) > 1 and np.array_equal(ids, wanted[1 : len(ids) + 1]):
        return Diagnosis("response: the first token is missing", ": the first token of the response is missing")
    return Diagnosis()


def diagnose_logprobs(
    policy: Policy, version: int, prompt: Ids, ids: Ids, have: Logprobs, temperature: float, tolerance: float
) -> Diagnosis:
    """Explain log-probs of ``ids`` other than those of ``version`` at ``temperature``."""

    def near(wanted: Logprobs) -> bool:
        """True if these are the observed log-probs."""
        return len(wanted) == len(have) > 0 and bool(np.abs(have - wanted).max() <= tolerance)

    def right(version: int = version, prompt: Ids = prompt, temperature: float = temperature) -> Logprobs:
        """The policy's log-probs under changed circumstances."""
        return policy.logprobs(version, prompt, ids, temperature)

    for other in (1.0, 0.7, 1.3, 1.5):
        if other != temperature and near(right(temperature=other)):
            cause = "logprobs: the temperature of the request is not applied" if other == 1 else _TEMPERATURE
            return Diagnosis(cause, f": they are those at temperature {other:g}", _PROCESSORS)
    for older in _versions(version):
        if near(right(version=older)):
            return Diagnosis(_stale(older, version), f": they are those of version {older}", _LOADING)
    for changed, what, cause in _prompts(policy, prompt):
        if near(right(prompt=changed)):
            return Diagnosis(cause, f": they are those after the prompt {what}", _PROMPT)
    likeliest = policy.ahead(version, prompt, ids) if temperature == 1 else None
    return diagnose_numbers(right(), have, tolerance, None if likeliest is None else likeliest.max(1))


def diagnose_numbers(
    wanted: Logprobs, have: Logprobs, tolerance: float, likeliest: Logprobs | None = None
) -> Diagnosis:
    """Explain log-probs ``have`` by the correct ones alone. ``likeliest``: those of the most
    likely token at each place."""

    def near(other: Logprobs) -> bool:
        """True if these are the observed log-probs."""
        return len(other) == len(have) > 0 and bool(np.abs(have - other).max() <= tolerance)

    for base in (2, 10):
        if near(wanted / np.log(base)):
            text = f": they are to base {base}, not natural"
            return Diagnosis(f"logprobs: logarithms to base {base}, not natural ones", text, _PROCESSORS)
    if len(have) > 2:
        for one, other in ((have[1:], wanted[:-1]), (have[:-1], wanted[1:])):
            if np.abs(one - other).max() <= tolerance:
                return Diagnosis("logprobs: shifted by one token", ": each is that of the token beside it", _SHIFT)
    transforms: tuple[tuple[Callable[[], Logprobs], str, str], ...] = (
        (lambda: np.zeros_like(wanted), "logprobs: all are 0", "all are 0, as if none had been computed"),
        (lambda: np.exp(wanted), "logprobs: probabilities, not logarithms", "they are probabilities"),
        (lambda: -wanted, "logprobs: the sign is reversed", "they have the opposite sign"),
        (lambda: np.cumsum(wanted), "logprobs: cumulative sums", "each is the sum up to its token"),
    )
    for transform, cause, text in transforms:
        if np.ptp(wanted) > tolerance and near(transform()):
            return Diagnosis(cause, f": {text}", _PROCESSORS)
    if likeliest is not None and near(likeliest) and not near(wanted):
        text = ": they are those of the likeliest tokens, not of the drawn ones"
        return Diagnosis("logprobs: of the likeliest token, not of the drawn one", text, _SHIFT)
    if len(have) == len(wanted) > 0 and np.abs(have - wanted).max() <= _ROUNDED and np.ptp(wanted) > 4 * _ROUNDED:
        text = ": so little is usual in float16 and bfloat16"
        hint = (
            "the dtype of the engine: compute in float32, or check with --dtype or --tolerance of the precision used"
        )
        return Diagnosis("logprobs: rounded, as in 16-bit arithmetic", text, hint)
    if len(have) == len(wanted) and (have >= wanted - tolerance).all() and (have - wanted).max() < _CUT:
        text = ": none is lower, as if what was cut from the draw (top_k, top_p, min_p) were cut from the probabilities too"
        return Diagnosis("logprobs: of a distribution that is cut (top_k, top_p or min_p)", text, _PROCESSORS)
    return Diagnosis()


def diagnose_form(have: npt.NDArray[np.floating]) -> Diagnosis:
    """Explain values above 0 where log-probs were expected."""
    if np.isnan(have).any():
        return Diagnosis("logprobs: NaN")
    if (have >= 0).all() and (have <= 1).all():
        return Diagnosis("logprobs: probabilities, not logarithms", "", _PROCESSORS)
    return Diagnosis("logprobs: the sign is reversed" if (have >= 0).all() else "", "", _PROCESSORS)


def _stale(held: int, wanted: int) -> str:
    return f"{OTHER_VERSION}the engine answers with {'older' if held < wanted else 'newer'} ones"


_TEMPERATURE = "logprobs: another temperature than the request's is applied"
_LOADING = (
    "load_weights(): each tensor is written where the engine computes from, also into fused, repacked and tied copies"
)
_PROMPT = (
    "how the prompt reaches the engine: token ids, never re-tokenised; special tokens, padding, the attention mask"
)
_TEXT = "take the drawn ids from the engine, never those of its text encoded anew"
_SHIFT = (
    "the index into the logits: the log-prob of token i is in the logits of position i - 1, at the drawn token's id"
)
_PROCESSORS = (
    "natural logs of the softmax over the whole vocabulary, with the request's temperature and no other processor"
)


def _versions(version: int) -> Iterator[int]:
    """Versions that an engine may hold instead: a few before, the next, the first."""
    seen = {version}
    for other in (*range(version - 1, version - 1 - _BACK, -1), version + 1, 0):
        if other >= 0 and other not in seen:
            seen.add(other)
            yield other


def _prompts(policy: Policy, prompt: Ids) -> Iterator[tuple[Ids, str, str]]:
    """Yield the prompt as common faults change it, the change, and the cause."""
    if len(prompt) > 1:
        yield prompt[1:], "without its first token", "prompt: the first token is lost"
        yield prompt[:-1], "without its last token", "prompt: the last token is lost"
    for token in range(min(_LOW_IDS, policy.vocabulary)):
        put = np.array([token], np.int32)
        yield (
            np.concatenate([put, prompt]),
            f"with token {token} put before it",
            f"prompt: token {token} is added before it",
        )
        yield (
            np.concatenate([prompt, put]),
            f"with token {token} put after it",
            f"prompt: token {token} is added after it",
        )
    again = policy.retokenised(prompt)
    if again is not None and len(again) and not np.array_equal(again, prompt):
        yield again, "decoded to text and encoded again", "prompt: decoded to text and encoded again"
