"""Check of a version against a model folder, before an engine sees it.

Inference engines silently load part of a version, convert it, or keep the tensors it lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from asyncflow_sdk.errors import WeightMismatch
from asyncflow_sdk.interfaces import TensorType, WeightUpdate
from asyncflow_sdk.types import dtype_name
from asyncflow_sdk.workflow.model_folder import ModelFolder

_SHOWN = 20


def check_version(
    update: WeightUpdate, tensors: Mapping[str, TensorType], dtypes: Callable[[str], tuple[str, ...]], *,
    holder: str = "the model", tied: Callable[[str], bool] = lambda name: False, shown: int = _SHOWN,
) -> None:  # fmt: skip
    """Raise WeightMismatch for tensors that are missing, unknown, or of another shape or dtype; the
    message lists them.

    ``tensors``: of the model. ``dtypes``: accepted dtypes for one of theirs, the engine's own
    first. ``holder``: in the message. ``tied``: True for names that may be additional or missing,
    since they share memory with another tensor. ``shown``: at most this many problems are listed.
    """
    problems, hint, untrained = [], "", set(update.untrained)
    for name, given in update.tensors.items():
        held = tensors.get(name)
        if name in untrained:
            problems.append(f"{name}: the version has it, and says that it is not trained")
        if held is None:
            if not tied(name):
                problems.append(f"{name}: the model has no such weight")
            continue
        accepted = dtypes(held.dtype)
        if given.shape != held.shape or given.dtype not in accepted:
            wanted = f"{accepted[0]}{list(held.shape)}"
            if given.dtype not in accepted:
                hint = "\nThe publisher's dtype and the engine's must be the same."
            problems.append(f"{name}: the version has {given.dtype}{list(given.shape)}, {holder} {wanted}")
    missing = tensors.keys() - update.tensors.keys() - untrained
    problems += [f"{name}: missing from the version" for name in missing if not tied(name)]
    if problems:
        raise WeightMismatch(
            f"version {update.version} does not fit this model, nothing was loaded:\n  {listed(problems, shown)}{hint}"
        )


def check_fit(
    update: WeightUpdate, folder: ModelFolder, dtypes: Callable[[str], tuple[str, ...]], *, holder: str = "the model"
) -> dict[str, str]:
    """Check a version as ``check_version`` against a folder. A second name of a tied weight may be missing, and may
    be additional. Returns the second names in the version, each with the first. Raises WeightMismatch."""
    second: dict[str, str] = {}

    def tied(name: str) -> bool:
        """Record a second name with the bytes of a tensor in the folder."""
        kind = update.tensors.get(name)
        if kind is None:
            return name in folder.redundant
        alike = [other for other, each in update.tensors.items() if each == kind and other in folder.tensors]
        first = first_equal(update, name, [other for other in alike if other != name])
        second.update({name: first} if first is not None else {})
        return first is not None

    check_version(update, folder.tensors, dtypes, holder=holder, tied=tied)
    odd = [name for name in folder.redundant if name in update.tensors and not tied(name)]
    if odd:
        raise WeightMismatch(
            f"version {update.version}: {odd[0]} is not {folder.embeddings(odd[0])[0]}, and the configuration ties them"
        )
    return second


def first_equal(update: WeightUpdate, name: str, others: Sequence[str]) -> str | None:
    """Return the first of ``others`` with the bytes of tensor ``name``."""
    place = update.place(name)
    if place is not None:
        for other in others:
            if update.place(other) == place:
                return other
    if not others:
        return None
    arrays = {each: array for each, array in update.arrays() if each == name or each in others}
    raw = {each: np.ascontiguousarray(array).reshape(-1).view(np.uint8) for each, array in arrays.items()}
    return next((other for other in others if np.array_equal(raw[other], raw[name])), None)


def listed(problems: list[str], shown: int = _SHOWN) -> str:
    """Return the sorted problems, one per line, at most ``shown``."""
    more = f"\n  and {len(problems) - shown} more" if len(problems) > shown else ""
    return "\n  ".join(sorted(problems)[:shown]) + more


def announced_arrays(update: WeightUpdate, names: Collection[str]) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield (name, array) of these tensors of an update, each once. Raises WeightMismatch for an
    array unlike its announcement, and after the last one if any is missing."""
    left = set(names)
    for name, array in update.arrays():
        if name not in left:
            continue
        wanted, given = update.tensors[name], (dtype_name(array.dtype), array.shape)
        if given != tuple(wanted):
            raise WeightMismatch(
                f"version {update.version}: {name} came as {given[0]}{list(given[1])}, and was announced as"
                f" {wanted.dtype}{list(wanted.shape)}"
            )
        left.remove(name)
        yield name, array
    if left:
        raise WeightMismatch(
            f"version {update.version} announced {', '.join(sorted(left)[:10])}, and did not bring it"
        )
