"""Model folders: a version of the weights as a Hugging Face folder, complete or absent.

with whole_folder(path) as part:                                  # written beside, then renamed
    engine.export(part)
with fetch_version(queue, 20).fetch() as update:
    write_model_folder(update, "models/base", Path("runs/first/best"))
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..interfaces import WeightUpdate
from ..memory import make_private_directory
from ..types.safetensors import plan

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf")


@dataclass(frozen=True)
class ModelFolders:
    """The model folders of a trainer: ``step-000020`` after every ``every`` steps. The newest ``limit``
    stay; None: all."""

    directory: Path
    every: int
    limit: int | None = None

    def due(self, steps: int) -> bool:
        """True if a folder is written after so many steps."""
        return steps % self.every == 0

    def path(self, steps: int) -> Path:
        """Return the folder of the weights after so many steps."""
        return self.directory / f"step-{steps:06d}"

    def trim(self) -> None:
        """Remove the oldest folders beyond the limit."""
        for step in steps_in(self.directory)[: -self.limit] if self.limit is not None else ():
            shutil.rmtree(self.path(step), ignore_errors=True)


def steps_in(directory: Path) -> list[int]:
    """Return the steps of the folders "step-000020" in a directory, in order."""
    names = (re.fullmatch("step-([0-9]{6,})", path.name) for path in directory.glob("step-*"))
    return sorted(int(name[1]) for name in names if name)


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Give a new folder, renamed to ``path`` after the block, in the place of an earlier one; removed
    after an error."""
    part = path.with_name(f".{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    make_private_directory(part.parent)
    make_private_directory(part)
    try:
        yield part
        old = path.with_name(f".{path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            path.rename(old)
        part.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_model_folder(update: WeightUpdate, model: str, path: Path) -> None:
    """Write a version bit for bit, with the other files of the folder ``model``: configuration,
    tokenizer, generation configuration. Raises OSError."""
    dtypes = {kind.dtype for kind in update.tensors.values()}
    with whole_folder(path) as part:
        for file in Path(model).iterdir():
            if file.is_file() and not any(file.match(pattern) for pattern in _WEIGHTS):
                shutil.copy2(file, part / file.name)
        config = part / "config.json"
        if len(dtypes) == 1 and config.is_file():  # loaded as it was published
            described = json.loads(config.read_bytes())
            described.pop("torch_dtype", None)
            config.write_text(json.dumps({**described, "dtype": dtypes.pop()}, indent=2) + "\n")
        layout = plan(
            {name: (kind.dtype, kind.shape) for name, kind in update.tensors.items()}, metadata={"format": "pt"}
        )
        with open(part / "model.safetensors", "wb") as weights:
            weights.write(layout.header)
            for name, array in update.arrays():
                weights.seek(layout.offsets[name])
                weights.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
