"""Diagnosis: name the fault between the correct tokens or log-probs and the observed ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
_DTYPE = "the dtype of the engine: compute in float32, or check with --dtype or --tolerance of the precision used"
_NEW_ONLY = "return the new tokens only: generate() of transformers returns the prompt with them"


class Diagnosis(NamedTuple):
    """``cause``: the fault, as "part: fault"; "" if unknown. ``text``: appended to the message.
    ``hint``: where to look."""

    cause: str = ""
    text: str = ""
    hint: str = ""

    def or_else(self, cause: str) -> str:
        """Return ``cause``, suspected by a check, unless the numbers show a more specific one."""
        return cause if cause and (not self.cause or self.cause.startswith(OTHER_VERSION)) else self.cause


Theory = tuple[Logprobs, Diagnosis]
"""Log-probs as a fault makes them."""


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
        return Diagnosis("response: it begins with the prompt", ": the response begins with the prompt", _NEW_ONLY)
    if len(ids) > 1 and np.array_equal(ids, wanted[1 : len(ids) + 1]):
        return Diagnosis("response: the first token is missing", ": the first token of the response is missing")
    return Diagnosis()


def diagnose_logprobs(
    policy: Policy, version: int, prompt: Ids, ids: Ids, have: Logprobs, temperature: float, tolerance: float
) -> Diagnosis:
    """Explain log-probs of ``ids`` other than those of ``version`` at ``temperature``."""

    def _theories() -> Iterator[Theory]:
        for other in (1.0, 0.7, 1.3, 1.5):
            how = (
                "the temperature of the request is not" if other == 1 else "another temperature than the request's is"
            )
            found = Diagnosis(f"logprobs: {how} applied", f": they are those at temperature {other:g}", _PROCESSORS)
            if other != temperature:
                yield policy.logprobs(version, prompt, ids, other), found
        for older in _versions(version):
            found = Diagnosis(_stale(older, version), f": they are those of version {older}", _LOADING)
            yield policy.logprobs(older, prompt, ids, temperature), found
        for changed, what, cause in _prompts(policy, prompt):
            found = Diagnosis(cause, f": they are those after the prompt {what}", _PROMPT)
            yield policy.logprobs(version, changed, ids, temperature), found

    likeliest = policy.ahead(version, prompt, ids) if temperature == 1 else None
    right = policy.logprobs(version, prompt, ids, temperature)
    return _first(_theories(), have, tolerance) or diagnose_numbers(
        right, have, tolerance, None if likeliest is None else likeliest.max(1)
    )


def diagnose_numbers(
    wanted: Logprobs, have: Logprobs, tolerance: float, likeliest: Logprobs | None = None
) -> Diagnosis:
    """Explain log-probs ``have`` by the correct ones alone. ``likeliest``: the log-probs of the most
    likely token at each place."""
    theories: list[Theory] = [
        (wanted / np.log(base), Diagnosis(f"logprobs: logarithms to base {base}, not natural ones",
                                          f": they are to base {base}, not natural", _PROCESSORS))
        for base in (2, 10)
    ]  # fmt: skip
    if found := _first(theories, have, tolerance):
        return found
    if len(have) > 2:
        for one, other in ((have[1:], wanted[:-1]), (have[:-1], wanted[1:])):
            if np.abs(one - other).max() <= tolerance:
                return Diagnosis("logprobs: shifted by one token", ": each is that of the token beside it", _SHIFT)
    theories = [
        (np.zeros_like(wanted), Diagnosis("logprobs: all are 0", ": all are 0, as if none had been computed", _PROCESSORS)),
        (np.exp(wanted), Diagnosis("logprobs: probabilities, not logarithms", ": they are probabilities", _PROCESSORS)),
        (-wanted, Diagnosis("logprobs: the sign is reversed", ": they have the opposite sign", _PROCESSORS)),
        (np.cumsum(wanted), Diagnosis("logprobs: cumulative sums", ": each is the sum up to its token", _PROCESSORS)),
    ]  # fmt: skip
    if len(wanted) and np.ptp(wanted) > tolerance and (found := _first(theories, have, tolerance)):
        return found
    apart = np.abs(have - wanted).max() if len(have) == len(wanted) > 0 else np.inf
    if likeliest is not None and _is_near(likeliest, have, tolerance) and apart > tolerance:
        text = ": they are those of the likeliest tokens, not of the drawn ones"
        return Diagnosis("logprobs: of the likeliest token, not of the drawn one", text, _SHIFT)
    if apart <= _ROUNDED and np.ptp(wanted) > 4 * _ROUNDED:
        text = ": so little is usual in float16 and bfloat16"
        return Diagnosis("logprobs: rounded, as in 16-bit arithmetic", text, _DTYPE)
    if apart < _CUT and (have >= wanted - tolerance).all():
        text = ": none is lower, as if what was cut from the draw (top_k, top_p, min_p) were cut from the probabilities too"
        return Diagnosis("logprobs: of a distribution that is cut (top_k, top_p or min_p)", text, _PROCESSORS)
    return Diagnosis()


def _first(theories: Iterable[Theory], have: Logprobs, tolerance: float) -> Diagnosis | None:
    return next((found for wanted, found in theories if _is_near(wanted, have, tolerance)), None)


def _is_near(wanted: Logprobs, have: Logprobs, tolerance: float) -> bool:
    return len(wanted) == len(have) > 0 and bool(np.abs(have - wanted).max() <= tolerance)


def diagnose_form(have: npt.NDArray[np.floating]) -> Diagnosis:
    """Explain values above 0 where log-probs were expected."""
    if np.isnan(have).any():
        return Diagnosis("logprobs: NaN")
    if (have >= 0).all() and (have <= 1).all():
        return Diagnosis("logprobs: probabilities, not logarithms", "", _PROCESSORS)
    return Diagnosis("logprobs: the sign is reversed" if (have >= 0).all() else "", "", _PROCESSORS)


def _stale(held: int, wanted: int) -> str:
    return f"{OTHER_VERSION}the engine answers with {'older' if held < wanted else 'newer'} ones"


def _versions(version: int) -> list[int]:
    others = dict.fromkeys((*range(version - 1, version - 1 - _BACK, -1), version + 1, 0))
    return [other for other in others if other >= 0 and other != version]


def _prompts(policy: Policy, prompt: Ids) -> Iterator[tuple[Ids, str, str]]:
    if len(prompt) > 1:
        yield prompt[1:], "without its first token", "prompt: the first token is lost"
        yield prompt[:-1], "without its last token", "prompt: the last token is lost"
    for token in range(min(_LOW_IDS, policy.vocabulary)):
        for place, changed in (
            ("before", np.append(np.int32(token), prompt)),
            ("after", np.append(prompt, np.int32(token))),
        ):
            yield changed, f"with token {token} put {place} it", f"prompt: token {token} is added {place} it"
    again = policy.retokenised(prompt)
    if again is not None and len(again) and not np.array_equal(again, prompt):
        yield again, "decoded to text and encoded again", "prompt: decoded to text and encoded again"
