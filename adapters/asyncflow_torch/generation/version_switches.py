"""Version switches: versions that drew the tokens of responses under way during a load.

    switches = ((0, 3),)                          # version 3 draws from token 0 on
    switches = switched(switches, 17, 4)          # version 4 draws from token 17 on
    spans_of(switches, 40)                        # (VersionSpan(3, 0, 17), VersionSpan(4, 17, 40))

All running responses of a request have the same number of tokens, and so the same switches.
"""

from __future__ import annotations

import functools

from asyncflow_sdk.types import VersionSpan

Switches = tuple[tuple[int, int], ...]
"""(first token, version), in order; the first is token 0."""


def switched(switches: Switches, token: int, version: int) -> Switches:
    """Return the switches with ``version`` from ``token`` on."""
    kept = tuple(switch for switch in switches if switch[0] < token)
    return kept if kept and kept[-1][1] == version else (*kept, (token, version))


@functools.lru_cache(1024)  # rows that end together have the same
def spans_of(switches: Switches, length: int) -> tuple[VersionSpan, ...]:
    """Return the spans of a response of ``length`` tokens, possibly interrupted right after the
    last switch."""
    if len(switches) == 1 and length:
        return (VersionSpan(switches[0][1], 0, length),)
    ends = [*(token for token, _ in switches[1:]), length]
    spans = (VersionSpan(version, token, end) for (token, version), end in zip(switches, ends, strict=False))
    return tuple(span for span in spans if span.start < span.end)
