"""Export of a policy as a Hugging Face folder, written by all ranks together."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch

from asyncflow_sdk.workflow.model_folder import copy_small_files

from .folder_map import FlatRun, FolderMap
from .ranks import Ranks
from .sharded_files import RANK_BUCKET_BYTES, FileParts, Kind, Piece, nbytes_of, write_together

FILE_BYTES = 5 << 30
"""Maximum size of an exported file, unless a single tensor is larger."""


def export_folder(
    path: Path, folder: FolderMap, runs: Collection[tuple[str, FlatRun]], ranks: Ranks, *, bucket_bytes: int = RANK_BUCKET_BYTES,
    file_bytes: int = FILE_BYTES,
) -> None:  # fmt: skip
    """Write a model folder like the one of the start: its names, dtypes, configuration and small files, and the bytes
    of its untrained tensors. ``runs``: this rank's elements of the parameters. A collective."""
    held = {name: folder.folder.tensors[name] for name in folder.untrained}
    untrained = {name: (getattr(torch, each.dtype), each.shape) for name, each in held.items()}

    def pieces(names: Collection[str]) -> Iterator[Piece]:
        yield from folder.pieces(names, runs)
        for name in untrained.keys() & names if ranks.first else ():
            yield name, folder.read(name), 0

    kinds = {**folder.kinds, **untrained}
    files = _split(kinds, file_bytes)

    def begin() -> None:
        """Write configuration, tokenizer and other small files."""
        path.mkdir(parents=True, exist_ok=True)
        if ranks.first:
            copy_small_files(folder.folder.folder, path)
            folder.save_pretrained(path)

    def end() -> None:
        """Write the index."""
        if ranks.first and len(files) > 1:
            weight_map = {name: file for file, names in files.items() for name in names}
            index = {"metadata": {"total_size": sum(map(nbytes_of, kinds.values()))}, "weight_map": weight_map}
            (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))

    ranks.together(begin)
    for file, names in files.items():
        parts = FileParts({name: kinds[name] for name in names}, pieces(names))
        write_together(path / file, parts, ranks, bucket_bytes=bucket_bytes)
    ranks.together(end)


def _split(kinds: Mapping[str, Kind], file_bytes: int) -> dict[str, list[str]]:
    """Return the tensor names of each file by file name."""
    files: list[list[str]] = [[]]
    room = file_bytes
    for name, kind in kinds.items():
        if files[-1] and nbytes_of(kind) > room:
            files.append([])
            room = file_bytes
        files[-1].append(name)
        room -= nbytes_of(kind)
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {f"model-{n:05}-of-{len(files):05}.safetensors": names for n, names in enumerate(files, 1)}
