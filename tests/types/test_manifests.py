"""Manifests that no publisher makes cannot be made, nor decoded: whoever has one can cut its chunks into buckets."""

import msgspec
import pytest

from asyncflow_sdk.types import Chunk, Manifest, TensorInfo

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("sizes", "bucket", "reason"),
    [
        ((100, 0), 0, "buckets of 0 bytes have no size"),
        ((100, 0), -5, "buckets of -5 bytes have no size"),
        ((100, -4), 64, "chunk 1 has -4 bytes"),
        ((-(1 << 62),), 64, "chunk 0 has -"),
    ],
)
def test_a_manifest_whose_chunks_or_buckets_have_no_size_is_none(
    sizes: tuple[int, ...], bucket: int, reason: str
) -> None:
    chunks = tuple(Chunk(size) for size in sizes)
    good = Manifest(1, (TensorInfo("w", "float32", (4,), 0, 0),), (Chunk(100), Chunk(0)))
    with pytest.raises(ValueError, match=reason):
        Manifest(1, (), chunks, bucket)
    with pytest.raises(ValueError, match=reason):
        msgspec.structs.replace(good, chunks=chunks, bucket_bytes=bucket)
    body = msgspec.msgpack.encode((1, good.tensors, chunks, bucket))
    with pytest.raises(msgspec.ValidationError, match=reason):
        msgspec.msgpack.decode(body, type=Manifest)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(good), type=Manifest) == good
