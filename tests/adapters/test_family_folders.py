"""Engines over model folders of families: versions and exports have the folder's names, dtypes, bytes and files."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_folders import KINDS, family_folder, kinds_of, same, tensors_in

from asyncflow_sdk.types import Batch
from asyncflow_torch.train import TorchEngine


def _held(engine: Any) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in engine.named_weights()}


def _on_policy(engine: Any, batch: Batch) -> Batch:
    columns = Batch.of({"logprobs": engine.logprobs(batch)}).columns
    return Batch(batch.ids, batch.groups, {**batch.columns, **columns})


@pytest.mark.parametrize("name", KINDS)
def test_versions_and_exports_are_folders_like_the_one_of_the_start(
    name: str, batch: Batch, make_update: Any, rollout: Any, tmp_path: Path
) -> None:
    # given
    folder = family_folder(name, tmp_path / "model")
    given = tensors_in(folder)
    engine = TorchEngine(folder, learning_rate=0.01)

    # then version 0 is the folder, without what is not trained
    first = _held(engine)
    assert same(first, {each: tensor for each, tensor in given.items() if each not in engine.untrained})
    assert len(first) + len(engine.untrained) == len(given)

    # when a version is trained and an engine loads it
    engine.train_step(_on_policy(engine, batch))
    trained = _held(engine)
    update = make_update(trained)
    update.untrained = engine.untrained
    replica = rollout(folder)
    assert same(dict(replica.held_weights()), first)
    assert asyncio.run(replica.load_weights(update)) == trained.keys()

    # then it holds the bytes, and its log-probs are the trainer's
    assert not same(trained, first)
    assert same(dict(replica.held_weights()), trained)
    prompts, responses = ([row.tolist() for row in batch.ragged(column)] for column in ("prompt_ids", "response_ids"))
    scores = np.concatenate(asyncio.run(replica.logprobs(prompts, responses)))
    np.testing.assert_allclose(scores, engine.logprobs(batch).values, atol=0.05)

    # and the export is a folder like the first, from which the same policy is loaded
    (tmp_path / "out").mkdir()
    engine.export(tmp_path / "out")
    exported = tensors_in(tmp_path / "out")
    assert kinds_of(exported) == kinds_of(given)
    assert same({each: exported[each] for each in engine.untrained}, {each: given[each] for each in engine.untrained})
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in Path(folder).iterdir()}
    assert (tmp_path / "out" / "config.json").read_bytes() == Path(folder, "config.json").read_bytes()
    again = TorchEngine(str(tmp_path / "out"))
    assert same(_held(again), trained)
    np.testing.assert_array_equal(again.logprobs(batch).values, engine.logprobs(batch).values)

    # and after a rollback it is version 0 again
    engine.load_weights(make_update(first))
    assert same(_held(engine), first)


def test_a_given_dtype_is_that_of_versions_exports_and_configuration(
    rollout: Any, make_update: Any, tmp_path: Path
) -> None:
    # given a folder of two dtypes: an engine in one takes versions in it
    folder = family_folder("gemma3", tmp_path / "model")
    version = _held(TorchEngine(folder, dtype="bfloat16"))
    replica = rollout(folder)
    asyncio.run(replica.load_weights(make_update(version)))
    assert same(dict(replica.held_weights()), version)

    engine = TorchEngine(folder, dtype="float32")
    assert {tensor.dtype for _, tensor in engine.named_weights()} == {torch.float32}
    engine.export(tmp_path / "out")
    assert same(_held(TorchEngine(str(tmp_path / "out"))), _held(engine))
    assert '"bfloat16"' not in (tmp_path / "out" / "config.json").read_text()
