"""The demo task: reverse five digits, "31425=" to "52413". Plain Python, nothing to install."""

from __future__ import annotations

import random

DIGITS = 5


def prompts(n: int, seed: int) -> dict[str, list[str]]:
    """``n`` rows: columns ``prompt`` ("31425=") and ``answer`` ("52413"); the same for the same
    seed."""
    rng = random.Random(seed)
    numbers = ["".join(rng.choices("0123456789", k=DIGITS)) for _ in range(n)]
    return {"prompt": [f"{number}=" for number in numbers], "answer": [number[::-1] for number in numbers]}


def exact_match(response: list[str], answer: list[str]) -> list[float]:
    """Reward: 1.0 where the response is the answer, else 0.0."""
    return [float(given == wanted) for given, wanted in zip(response, answer, strict=True)]
