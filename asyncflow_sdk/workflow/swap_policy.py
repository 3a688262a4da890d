"""SwapPolicy: when a replica loads the version it has staged.

"drain"       as soon as it may: it takes no new prompts, finishes what runs, loads
"boundary"    when nothing runs: it goes on with the old version for as long as the staleness rule admits prompts for it
"partial"     as soon as it may: it interrupts what runs, loads, and has it go on where it was
"in_flight"   as soon as it may, while requests run: the engine stops between two tokens

A conversation with an agent that is between two turns runs only for "drain", which waits for its end; for the others nothing
of it is in the engine, and its next turn is of the version that is loaded then. Permission comes first, then draining: of many
replicas that may not swap at once, the others go on generating.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SwapPolicy:
    """``name``: as in ``Rollout.swap``."""

    name: str

    @property
    def stops(self) -> bool:
        """True if nothing may be in the engine during a load."""
        return self.name != "in_flight"

    @property
    def drains(self) -> bool:
        """True if all running requests end before a load."""
        return self.name == "drain"

    @property
    def interrupts(self) -> bool:
        """True if running requests are interrupted for a load."""
        return self.name == "partial"

    @property
    def waits_for_boundary(self) -> bool:
        """True if permission is requested only when nothing runs."""
        return self.name == "boundary"
