"""FolderMap: the region of a parameter behind each tensor of a model folder.

    folder = FolderMap.of(model, "models/mine", dtype="auto")
    runs = runs_of(model)                                         # or this rank's elements of each parameter
    publisher.publish(0, folder.published(runs.items()), untrained=folder.untrained)   # by the folder's names
    for name, tensor in update: folder.fill(name, tensor, runs)

transformers fuses experts and renames prefixes as it loads. The map is a trace of its own reversal of that, over
tensors without data: names and shapes are enough."""

from __future__ import annotations

import bisect
import collections
import difflib
import fnmatch
import functools
import itertools
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from transformers.core_model_loading import revert_weight_conversion

from asyncflow_http.model_folder import check_version, listed
from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.interfaces import TensorType, WeightUpdate
from asyncflow_sdk.types import Shard
from asyncflow_sdk.types.dtypes import FLOATS
from asyncflow_sdk.workflow.model_folder import ModelFolder, with_dtype

from .policy import element
from .sharded_files import Kind, Piece, Reader


class FlatRun:
    """Elements of a flattened parameter from ``first`` on: contiguous ones of ``tensor``, a live view."""

    def __init__(self, tensor: Any, first: int = 0) -> None:
        self.flat, self.first = tensor.detach().view(-1), first

    @property
    def stop(self) -> int:
        """The first element behind."""
        return self.first + int(self.flat.numel())


def runs_of(model: Any) -> dict[str, FlatRun]:
    """Return all elements of each parameter, tied ones once."""
    return {name: FlatRun(weight) for name, weight in model.named_parameters()}


class Region(NamedTuple):
    """Elements of the folder's tensor ``name``, a rectangle of ``shape`` from index ``start`` on, and the same ones
    of the parameter ``live``, flattened: from element ``offset`` on, by ``strides`` in each dimension."""

    name: str
    live: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]

    def within(self, run: FlatRun) -> Any:
        """Return a view of these elements of the parameter."""
        return run.flat.as_strided(self.shape, self.strides, run.flat.storage_offset() + self.offset - run.first)

    def of(self, tensor: Any) -> Any:
        """Return a view of these elements of the whole folder tensor."""
        return tensor[tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))]

    def narrow(self, dim: int, first: int, count: int) -> Region:
        """Return ``count`` indices of one dimension, from ``first`` on."""
        start, shape = list(self.start), list(self.shape)
        start[dim], shape[dim] = start[dim] + first, count
        offset = self.offset + first * self.strides[dim]
        return self._replace(start=tuple(start), shape=tuple(shape), offset=offset)

    def cut(self, low: int, high: int) -> Iterator[Region]:
        """Yield the regions among elements ``low`` to ``high`` of the flattened parameter, at most three a
        dimension."""
        last = self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        if low <= self.offset and last < high:
            yield self
            return
        if last < low or high <= self.offset:
            return
        dim = max((d for d, n in enumerate(self.shape) if n > 1), key=lambda d: self.strides[d])
        count, stride = self.shape[dim], self.strides[dim]
        span = last - self.offset - (count - 1) * stride  # from the first element of an index to its last
        low_index, high_index = low - self.offset, high - self.offset - 1
        whole = range(max(0, -(-low_index // stride)), min(count, (high_index - span) // stride + 1))
        touched = range(max(0, -(-(low_index - span) // stride)), min(count, high_index // stride + 1))
        if whole:
            yield self.narrow(dim, whole.start, len(whole))
        for index in touched:
            if index not in whole:
                yield from self.narrow(dim, index, 1).cut(low, high)


@dataclass(frozen=True)
class FolderMap:
    """``folder``: the model folder. ``kinds``: dtype and shape of its trained tensors, by name. ``untrained``: names
    of its other tensors: buffers, and tensors without a place in the model. ``regions``: the regions of each
    parameter; of tied parameters, of the first. ``second``: further names of tied weights, absent in the folder."""

    folder: ModelFolder
    kinds: Mapping[str, Kind]
    untrained: tuple[str, ...]
    regions: Mapping[str, tuple[Region, ...]]
    second: Mapping[str, str]

    @classmethod
    def of(cls, model: Any, folder: str, *, dtype: str = "auto", frozen: bool = False) -> FolderMap:
        """Return the map of a model loaded from ``folder``. ``dtype``: of all trained floating-point tensors; "auto"
        keeps the dtypes of the folder. Raises ConfigError, with the names, for parameters with another form there,
        and for a quantised folder. The map of a ``frozen`` model is empty then: nothing is written back."""
        held, first = ModelFolder(folder), dict[int, str]()
        named = model.named_parameters(remove_duplicate=False)
        alias = {name: first.setdefault(id(each), name) for name, each in named}
        state = model.state_dict(keep_vars=True).items()
        shapes = {name: tuple(getattr(each, "ds_shape", each.shape)) for name, each in state}
        regions: dict[str, list[Region]] = {name: [] for name in first.values() if name in shapes}
        absent, reordered = dict[str, str](), set[str]()
        for live, found in _traced(model, shapes, held.tensors):
            if live in alias:
                there = [region._replace(live=alias[live]) for region in found if region.name in held.tensors]
                regions[alias[live]] += there
                reordered |= set() if found else {live}
                if not there and len(found) == 1:
                    absent[found[0].name] = alias[live]
        sizes = collections.Counter[str]()
        for region in itertools.chain(*regions.values()):
            sizes[region.name] += _size(region)
        lost = [name for name, each in regions.items() if sum(map(_size, each)) < math.prod(shapes[name])]
        lost += [name for name, size in sizes.items() if size != math.prod(held.tensors[name].shape)]
        try:
            held.check_unquantised(sizes)
            if lost:
                cure = "" if reordered & {*lost} else "\nsave the model again with save_pretrained"
                raise ConfigError(
                    f"model folder {folder!r} has these weights in a form that cannot be written back:\n  {listed(lost)}{cure}"
                )
        except ConfigError:
            if not frozen:
                raise
            return cls(held, {}, (), {}, {})
        kinds = {name: (_dtype(each, dtype), each.shape) for name, each in held.tensors.items() if name in sizes}
        second = {name: regions[live][0].name for name, live in absent.items()}
        untrained = tuple(sorted(held.tensors.keys() - kinds.keys()))
        return cls(held, kinds, untrained, {live: tuple(each) for live, each in regions.items()}, second)

    def freeze(self, model: Any, patterns: Sequence[str]) -> FolderMap:
        """Turn off the gradients of parameters whose tensors in the folder match ``patterns`` of fnmatch, and return
        the map without them. Raises ConfigError for a pattern without a match, a parameter with a match in a part of
        its tensors, and if no parameter is left."""
        names, matched, partly = self.folder.tensors.keys(), set[str](), list[str]()
        for pattern in patterns:
            if not (found := fnmatch.filter(names, pattern)):
                near = ", ".join(_near(pattern, names))
                raise ConfigError(
                    f"freeze={pattern!r} matches no tensor of model folder {self.folder.folder!r}; near: {near}"
                )
            matched |= {*found}
        kept = dict(self.regions)
        for live, regions in self.regions.items():
            free = {region.name for region in regions} - matched
            if len(free) < len({region.name for region in regions}):
                del kept[live]
                partly += free
        if partly:
            raise ConfigError(
                f"freeze={list(patterns)} leaves out parts of weights that are one in the model; match these, too:\n"
                f"  {listed(partly)}"
            )
        if patterns and not kept:
            raise ConfigError(
                f"freeze={list(patterns)} leaves no weight to train in model folder {self.folder.folder!r}"
            )
        for live, parameter in model.named_parameters():
            parameter.requires_grad_(live in kept)
        kinds = {name: kind for name, kind in self.kinds.items() if name not in matched}
        second = {name: other for name, other in self.second.items() if other in kinds}
        untrained = tuple(sorted(names - kinds.keys()))
        return replace(self, kinds=kinds, untrained=untrained, regions=kept, second=second)

    @functools.cached_property
    def types(self) -> dict[str, TensorType]:
        """Dtype and shape of the trained tensors, as versions name them."""
        return {
            name: TensorType(str(dtype).removeprefix("torch."), shape) for name, (dtype, shape) in self.kinds.items()
        }

    @functools.cached_property
    def by_name(self) -> dict[str, list[Region]]:
        """Regions by tensor of the folder."""
        regions = sorted(itertools.chain(*self.regions.values()), key=lambda region: region.name)
        found = {name: list(each) for name, each in itertools.groupby(regions, lambda region: region.name)}
        return found | {name: found[other] for name, other in self.second.items()}

    @functools.cached_property
    def dtypes(self) -> dict[str, Any]:
        """Published dtype by parameter."""
        return {live: self.kinds[regions[0].name][0] for live, regions in self.regions.items()}

    def place(self, name: str) -> tuple[Any, ...]:
        """Return what is equal for two names of the same elements."""
        return tuple(region[1:] for region in self.by_name[name])

    def check(self, update: WeightUpdate) -> None:
        """Raise WeightMismatch unless ``update`` is a version of these tensors, in any floating-point dtype."""
        check_version(update, self.types, lambda dtype: (dtype, *FLOATS) if dtype in FLOATS else (dtype,))

    def published(self, runs: Iterable[tuple[str, FlatRun]], *, bucket_bytes: int = 0) -> Iterator[tuple[str, Any]]:
        """Yield (name, tensor or Shard) of elements of parameters: views, except where the dtype differs; these are
        at most ``bucket_bytes`` each if it is given, or one row."""
        for live, run in runs:
            for region in self._cut(live, run):
                dtype, whole = self.kinds[region.name]
                rows = limit = region.shape[0] if region.shape else 1
                if bucket_bytes and run.flat.dtype != dtype:
                    limit = max(1, bucket_bytes * rows // max(1, _size(region) * dtype.itemsize))
                for low in range(0, rows, limit):
                    piece = region.narrow(0, low, min(limit, rows - low)) if limit < rows else region
                    tensor = piece.within(run).to(dtype)
                    yield piece.name, tensor if piece.shape == whole else Shard(tensor, piece.start, whole)
                    del tensor

    def fill(self, name: str, tensor: Any, runs: Mapping[str, FlatRun]) -> None:
        """Copy a whole tensor of the folder into the elements of parameters that are given."""
        with torch.no_grad():
            for whole in self.by_name[name]:
                if (run := runs.get(whole.live)) is not None:
                    for region in whole.cut(run.first, run.stop):
                        region.within(run).copy_(region.of(tensor))

    def pieces(self, names: Collection[str], runs: Iterable[tuple[str, FlatRun]]) -> Iterator[Piece]:
        """Yield runs of elements of the named tensors, for a file."""
        for live, run in runs:
            for region in self._cut(live, run):
                if region.name in names:
                    yield from _in_order(region.name, region.within(run), region.start, self.kinds[region.name][1])

    def whole(self, name: str, runs: Mapping[str, FlatRun]) -> Any:
        """Return a tensor of the folder from whole parameters: a view, if it is one region in the folder's dtype."""
        regions = self.by_name[name]
        dtype, shape = self.kinds[self.second.get(name, name)]
        if len(regions) == 1:
            return regions[0].within(runs[regions[0].live]).to(dtype)
        joined = torch.empty(shape, dtype=dtype, device=runs[regions[0].live].flat.device)
        for region in regions:
            region.of(joined).copy_(region.within(runs[region.live]))
        return joined

    def is_rounded(self, name: str, dtype: Any, runs: Mapping[str, FlatRun]) -> bool:
        """True if the parameters of a tensor are less precise than ``dtype``."""
        return any(runs[region.live].flat.dtype.itemsize < dtype.itemsize for region in self.by_name[name])

    def exact(self, runs: Mapping[str, FlatRun]) -> None:
        """Fill elements in float32 with the folder's numbers where a model in a lower precision has rounded them."""
        for name, (dtype, _) in self.kinds.items():
            if dtype == torch.float32 and any(region.live in runs for region in self.by_name[name]):
                self.fill(name, self.read(name), runs)

    def read(self, name: str) -> Any:
        """Return a copy of a tensor in the folder."""
        with Reader(Path(self.folder.places[name].path)) as file:
            return file.whole(name)

    def save_pretrained(self, path: Path) -> None:
        """Write the folder's configuration; with another dtype, if the tensors have one."""
        config = Path(self.folder.folder, "config.json").read_bytes()
        for dtype in {
            each.dtype for name, each in self.types.items() if each.dtype != self.folder.tensors[name].dtype
        }:
            config = json.dumps(with_dtype(json.loads(config), dtype), indent=2).encode()
        (path / "config.json").write_bytes(config)

    def _cut(self, live: str, run: FlatRun) -> Iterator[Region]:
        for region in self.regions.get(live, ()):
            yield from region.cut(run.first, run.stop)


class _Views(TorchFunctionMode):  # type: ignore[misc]
    """Keep views of tensors as views, and the pieces of tensors that are put together."""

    def __init__(self) -> None:
        super().__init__()
        self.joined: dict[int, tuple[Any, list[Any], int]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Leave out copies into contiguous memory, and record joins."""
        given = kwargs or {}
        if func == torch.Tensor.contiguous:
            return args[0]
        result = func(*args, **given)
        if func in (torch.cat, torch.stack):
            dim = (args[1] if len(args) > 1 else given.get("dim", 0)) % result.dim()
            pieces = [each.unsqueeze(dim) if func is torch.stack else each for each in args[0]]
            self.joined[id(result)] = result, pieces, dim
        return result


def _traced(
    model: Any, shapes: Mapping[str, tuple[int, ...]], held: Mapping[str, TensorType]
) -> Iterator[tuple[str, list[Region]]]:
    """Yield the regions of each parameter and buffer: by transformers' names, if the folder has them all; else by the
    live name, if the folder has that."""
    starts = list(itertools.accumulate(map(math.prod, shapes.values()), initial=0))
    flat = torch.empty(starts[-1], dtype=torch.bfloat16, device="meta")
    lives = list(shapes)
    views = {live: flat[a:b].view(shapes[live]) for live, a, b in zip(lives, starts, starts[1:], strict=False)}
    found: dict[str, list[Region]] = {live: [] for live in lives}

    def place(name: str, tensor: Any, start: tuple[int, ...]) -> None:
        """Record the regions of one result."""
        if id(tensor) in mode.joined:
            _, pieces, dim = mode.joined[id(tensor)]
            for each in pieces:
                place(name, each, start)
                start = (*start[:dim], start[dim] + each.shape[dim], *start[dim + 1 :])
        elif tensor.untyped_storage()._cdata == flat.untyped_storage()._cdata:
            number = bisect.bisect_right(starts, tensor.storage_offset()) - 1
            offset = tensor.storage_offset() - starts[number]
            region = Region(name, lives[number], start, tuple(tensor.shape), offset, tuple(tensor.stride()))
            found[region.live].append(region)

    with _Views() as mode:
        reverted = revert_weight_conversion(model, dict(views))
    for name, tensor in reverted.items():
        place(_in_folder(name, model.base_model_prefix, held), tensor, (0,) * tensor.dim())
    for live, regions in found.items():
        name, shape = _in_folder(live, model.base_model_prefix, held), shapes[live]
        if not all(map(held.get, (region.name for region in regions))) and name in held and held[name].shape == shape:
            regions = [Region(name, live, (0,) * len(shape), shape, 0, tuple(views[live].stride()))]
        yield live, regions


def _in_folder(name: str, prefix: str, held: Mapping[str, TensorType]) -> str:
    """Return a name as the folder has it: with or without the prefix of the model below the output layer."""
    names = (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
    return next((each for each in names if each in held), name)


def _in_order(name: str, tensor: Any, start: tuple[int, ...], whole: tuple[int, ...]) -> Iterator[Piece]:
    """Yield the runs of a rectangle, which begins at ``start``, in a tensor of shape ``whole``."""
    if tuple(tensor.shape[1:]) == whole[1:]:
        yield name, tensor, start[0] * math.prod(whole[1:]) if start else 0
        return
    for index, row in enumerate(tensor, start[0]):
        for _, run, at in _in_order(name, row, start[1:], whole[1:]):
            yield name, run, index * math.prod(whole[1:]) + at


def _near(pattern: str, names: Collection[str]) -> list[str]:
    """Return three names with words like those of a pattern."""
    words = {word for name in names for word in name.split(".")}
    near = [each for word in re.findall(r"\w+", pattern) for each in difflib.get_close_matches(word, words, 1)]
    return sorted(names, key=lambda name: (-len({*near} & {*name.split(".")}), name))[:3]


def _size(region: Region) -> int:
    return math.prod(region.shape)


def _dtype(held: TensorType, dtype: str) -> Any:
    own = getattr(torch, held.dtype)
    return own if dtype == "auto" or not own.is_floating_point else element(dtype)
