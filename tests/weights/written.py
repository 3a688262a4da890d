"""A version written into a sender's rooms, without a queue: what a publisher does, in one thread."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch

from asyncflow_sdk.interfaces import Fetched, WeightReceiver, WeightSender
from asyncflow_sdk.types import Chunk, Manifest, from_torch
from asyncflow_sdk.weights import Update
from asyncflow_sdk.weights.arguments import lasts
from asyncflow_sdk.weights.hashing import Hashing
from asyncflow_sdk.weights.writing import Writer


class Sent(NamedTuple):
    manifest: Manifest
    where: bytes

    def fetched(self, receiver: WeightReceiver) -> Fetched:
        return receiver.fetch(self.manifest, self.where, timeout_s=10.0)

    def update(self, receiver: WeightReceiver) -> Update:
        return Update(self.manifest.version, [self.fetched(receiver)])


def write(
    sender: WeightSender,
    version: int,
    weights: Iterable[tuple[str, Any]],
    *,
    bucket: int = 1 << 16,
    sizes: Sequence[int] = (),
    **policy: Any,
) -> Manifest:
    """Written and hashed, but not sent."""
    with ThreadPoolExecutor(1) as behind:
        hashing = Hashing(behind)
        writer = Writer(version, sender.room, hashing, helper=behind, bucket_bytes=bucket, sizes=sizes, **policy)
        written = writer.write(weights, lasting=lasts(weights))
        chunks = tuple(Chunk(*each) for each in zip(written, hashing.digests(), strict=True))
    return Manifest(version, writer.tensors, chunks, bucket)


def send(sender: WeightSender, version: int, weights: Iterable[tuple[str, Any]], **options: Any) -> Sent:
    manifest = write(sender, version, weights, **options)
    return Sent(manifest, sender.send(manifest))


def plain(tensor: Any) -> Any:
    """As numpy, in native byte order."""
    array = from_torch(tensor) if isinstance(tensor, torch.Tensor) else np.asarray(tensor)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def same(weights: dict[str, Any], update: Any) -> None:
    """Names in order, dtypes, shapes and every bit."""
    arrays, tensors = dict(update.arrays()), dict(update)
    assert list(arrays) == list(tensors) == list(weights) == list(update.tensors)
    for name, given in weights.items():
        wanted = plain(given)
        assert (arrays[name].dtype, arrays[name].shape) == (wanted.dtype, wanted.shape), name
        assert arrays[name].tobytes() == wanted.tobytes(), name
        assert tuple(tensors[name].shape) == wanted.shape == update.tensors[name].shape
        if isinstance(given, torch.Tensor):
            assert str(tensors[name].dtype) == str(given.dtype) == f"torch.{update.tensors[name].dtype}"
            raw = tensors[name].contiguous().reshape(-1).view(torch.uint8)
            assert raw.numpy().tobytes() == wanted.tobytes(), name
