"""Switches: which versions drew the tokens of responses that were under way when weights were loaded.

    switches = ((0, 3),)                          # begun under version 3
    switches = switched(switches, 17, 4)          # version 4 draws from token 17 on
    spans_of(switches, 40)                        # (VersionSpan(3, 0, 17), VersionSpan(4, 17, 40))

All responses to a request have drawn equally many tokens while they run, so that they share their switches.
"""

from __future__ import annotations

import functools

from asyncflow_sdk.types import VersionSpan

Switches = tuple[tuple[int, int], ...]
"""(first token, version), in order; the first is token 0."""


def switched(switches: Switches, token: int, version: int) -> Switches:
    """From ``token`` on, ``version`` draws."""
    kept = tuple(switch for switch in switches if switch[0] < token)
    return kept if kept and kept[-1][1] == version else (*kept, (token, version))


@functools.lru_cache(1024)  # rows that end together have the same
def spans_of(switches: Switches, length: int) -> tuple[VersionSpan, ...]:
    """The spans of a response of ``length`` tokens, which may have been interrupted right after the last switch."""
    if len(switches) == 1 and length:
        return (VersionSpan(switches[0][1], 0, length),)
    ends = [*(token for token, _ in switches[1:]), length]
    spans = (VersionSpan(version, token, end) for (token, version), end in zip(switches, ends, strict=False))
    return tuple(span for span in spans if span.start < span.end)
