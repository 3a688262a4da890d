"""A model folder, read in parts: at stage 3 no rank ever holds the whole model."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.types.safetensors import read_header


@contextlib.contextmanager
def in_parts(config: Mapping[str, Any]) -> Iterator[None]:
    """Within, models of transformers are made as ZeRO-3 has them, each parameter cut as it is made; rank 0 alone reads weights. A
    collective."""
    from transformers.integrations import HfDeepSpeedConfig  # imports DeepSpeed

    said = HfDeepSpeedConfig(dict(config))  # transformers looks whether it is there
    try:
        yield
    finally:
        del said


def stored_dtype(folder: str) -> str:
    """That of the weights in a model folder: what its configuration says, else what its first file has. Raises ConfigError for what is
    no model folder."""
    path = Path(folder)
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model folder {folder!r} has no config.json that can be read: {error}") from error
    said = config.get("dtype") or config.get("torch_dtype")
    if isinstance(said, str):
        return said
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb") as opened:
            found = {tensor.dtype for tensor in read_header(opened).tensors.values()}
            return next((dtype for dtype in ("bfloat16", "float16") if dtype in found), "float32")
    return "float32"
