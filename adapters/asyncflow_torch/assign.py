"""Assignment of a version to a model: all of it or nothing, by the names of the model folder.

held = assign(model, folder, update)                        # {"model.norm.weight": tensor, ...}
"""

from __future__ import annotations

from typing import Any

import torch

from asyncflow_http.model_folder import check_version, listed
from asyncflow_sdk.errors import WeightError, WeightMismatch
from asyncflow_sdk.interfaces import TensorType, WeightUpdate
from asyncflow_sdk.types.dtypes import FLOATS

from .folder_map import FolderMap, runs_of


class PartialLoad(WeightError):
    """Raised when a load failed half-way: the model holds a mixture of versions and must not be
    used."""


def assign(model: Any, folder: FolderMap, update: WeightUpdate) -> dict[str, Any]:
    """Write all tensors of ``update`` into the model, in place. Return the written weights by the
    names of the update: views, or a copy where the model has rounded one.

    Raises WeightMismatch, with all problems and before any write, for a version with a missing or
    unknown weight, another shape or dtype, or two different tensors for a tied weight. A later
    error leaves a mixture of versions and raises `PartialLoad`.
    """
    second = _second_names(folder, update, str(model.dtype).removeprefix("torch."))
    runs, left = runs_of(model), update.tensors.keys() - second
    rounded = {}
    try:
        for name, tensor in update:
            if name in second:
                continue
            # Hazard: copy_ broadcasts and converts, so it would accept an update unlike its announcement.
            wanted = _described(update.tensors[name]) if name in update.tensors else "nothing"
            if _type_of(tensor) != wanted:
                raise WeightMismatch(f"{name} came as {_type_of(tensor)}, and {wanted} was announced")
            folder.fill(name, tensor, runs)
            if folder.is_rounded(name, tensor.dtype, runs):
                rounded[name] = tensor.clone()
            left -= {name}
        if left:
            raise WeightMismatch(f"it did not bring {', '.join(sorted(left))}")
    except BaseException as error:
        raise PartialLoad(f"version {update.version} was written in part: {type(error).__name__}: {error}") from error
    dtypes = {name: getattr(torch, each.dtype) for name, each in update.tensors.items() if name not in rounded}
    return rounded | {name: folder.whole(name, runs).to(dtype) for name, dtype in dtypes.items()}


def _second_names(folder: FolderMap, update: WeightUpdate, dtype: str) -> dict[str, str]:
    """Return tensors of an update that are also given by another name, with this name. ``dtype``: the model's,
    accepted beside the folder's. Raises WeightMismatch with all problems of the update."""
    types, places = dict(folder.types), {name: folder.place(name) for name in folder.by_name}
    types |= {name: types[other] for name, other in folder.second.items()}
    given = {places[name] for name in update.tensors if name in places}
    held = {
        name: types[name]
        for name in types
        if name in update.tensors or (name in folder.kinds and places[name] not in given)
    }
    check_version(
        update, held, lambda own: (own, dtype) if own in FLOATS else (own,), shown=len(held) + len(update.tensors)
    )
    first: dict[Any, str] = {}
    second = {name: first[places[name]] for name in update.tensors if first.setdefault(places[name], name) != name}
    if second and (problems := _unequal(update, second)):
        raise WeightMismatch(
            f"version {update.version} does not fit this model, nothing was loaded:\n  {listed(problems)}"
        )
    return second


def _unequal(update: WeightUpdate, second: dict[str, str]) -> list[str]:
    """Return problems of tensors given under two names of one weight: they must be equal to the
    bit."""
    names = {*second, *second.values()}
    found = {name: tensor for name, tensor in update if name in names}
    return [
        f"{name}: differs from {other}, which is the same weight in this model"
        for name, other in second.items()
        if name not in found or other not in found or not _same(found[name], found[other])
    ]


def _same(one: Any, other: Any) -> bool:
    if _type_of(one) != _type_of(other):
        return False
    if one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
        return True
    return bool(torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (one, other))))


def _type_of(tensor: Any) -> str:
    return _described(TensorType(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)))


def _described(kind: TensorType) -> str:
    return f"{kind.dtype}{list(kind.shape)}"
