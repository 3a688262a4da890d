"""Signs: what wrong answers are right for, so that a failed check can say what is wrong and not only that something is."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from .policy import Logprobs, Policy

Ids = npt.NDArray[np.int32]
_BACK, _LOW_IDS, _MORE = 3, 3, 4
_CUT = 3.0
"""Nobody leaves less than a twentieth of the probability in the draw."""


def whose_tokens(policy: Policy, version: int, prompt: Ids, ids: Ids) -> str:
    """What greedy tokens that are not those of ``version`` after ``prompt`` are the answer to."""
    if not len(ids):
        return ""
    for other in _versions(version):
        if _same(policy.greedy(other, prompt, len(ids)), ids):
            return f": those are of version {other}"
    for changed, what in _prompts(policy, prompt):
        if _same(policy.greedy(version, changed, len(ids)), ids):
            return f": that is the answer to the prompt {what}"
    wanted = policy.greedy(version, prompt, len(ids) + _MORE)
    for length in range(1, len(wanted) + 1):
        again = policy.retokenised(wanted[:length])
        if again is not None and _same(again[: len(ids)], ids):
            return ": those are what the right tokens become when they are decoded to text and encoded again"
    return ""


def whose_logprobs(
    policy: Policy, version: int, prompt: Ids, ids: Ids, have: Logprobs, temperature: float, tolerance: float
) -> str:
    """What log-probs of ``ids`` that are not those of ``version`` at ``temperature`` would be right for."""

    def near(wanted: Callable[[], Logprobs]) -> bool:
        value = wanted()
        return len(value) == len(have) > 0 and bool(np.abs(have - value).max() <= tolerance)

    def of(version: int = version, prompt: Ids = prompt, temperature: float = temperature) -> Logprobs:
        return policy.logprobs(version, prompt, ids, temperature)

    for other in (1.0, 0.7, 1.3, 1.5):
        if other != temperature and near(lambda other=other: of(temperature=other)):  # type: ignore[misc]
            return f": they are those at temperature {other:g}"
    for older in _versions(version):
        if near(lambda older=older: of(version=older)):  # type: ignore[misc]
            return f": they are those of version {older}"
    for changed, what in _prompts(policy, prompt):
        if near(lambda changed=changed: of(prompt=changed)):  # type: ignore[misc]
            return f": they are those after the prompt {what}"
    wanted = of()
    for base in (2, 10):
        if near(lambda base=base: wanted / np.log(base)):  # type: ignore[misc]
            return f": they are to base {base}, not natural"
    beside = [np.abs(have[1:] - wanted[:-1]), np.abs(have[:-1] - wanted[1:])]
    if len(have) > 2 and min(apart.max() for apart in beside) <= tolerance:
        return ": each is that of the token beside it"
    if (have >= wanted - tolerance).all() and (have - wanted).max() < _CUT:
        return ": none is lower, as if what was cut from the draw (top_k, top_p, min_p) were cut from the probabilities too"
    return ""


def _versions(version: int) -> Iterator[int]:
    """Those that an engine could hold instead: the few before, the one after, the one that it began with."""
    seen = {version}
    for other in (*range(version - 1, version - 1 - _BACK, -1), version + 1, 0):
        if other >= 0 and other not in seen:
            seen.add(other)
            yield other


def _prompts(policy: Policy, prompt: Ids) -> Iterator[tuple[Ids, str]]:
    """What a prompt becomes on a wrong way into an engine."""
    if len(prompt) > 1:
        yield prompt[1:], "without its first token"
        yield prompt[:-1], "without its last token"
    for token in range(min(_LOW_IDS, policy.vocabulary)):
        put = np.array([token], np.int32)
        yield np.concatenate([put, prompt]), f"with token {token} put before it"
        yield np.concatenate([prompt, put]), f"with token {token} put after it"
    again = policy.retokenised(prompt)
    if again is not None and len(again) and not _same(again, prompt):
        yield again, "decoded to text and encoded again"


def _same(one: Ids, other: Ids) -> bool:
    return np.array_equal(one, other)
