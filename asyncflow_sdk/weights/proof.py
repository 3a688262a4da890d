"""Proof that an engine holds what was published: names, log-probs of a probe, what it holds."""

from __future__ import annotations

from collections.abc import Set

from ..errors import WeightMismatch
from ..types import Manifest


def check_names(manifest: Manifest, names: Set[str]) -> None:
    """Raise WeightMismatch, naming tensors, unless the names an engine took are exactly the manifest's."""
    published = {tensor.name for tensor in manifest.tensors}
    for what, odd in (
        ("were not taken by the engine", published - names),
        ("were never published", names - published),
    ):
        if odd:
            listed = ", ".join(sorted(odd)[:10])
            more = f" and {len(odd) - 10} more" if len(odd) > 10 else ""
            raise WeightMismatch(
                f"version {manifest.version}: {len(odd)} of {len(published)} tensors {what}: {listed}{more}"
            )
