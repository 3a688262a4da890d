from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from one_vllm import OPTIONS


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An engine and what is known of it, for all tests: a model whose output layer is its embedding, with a context of
    more than one block of vLLM's cache (128 tokens on a CPU)."""
    from asyncflow_sdk.testing.kit.rollout.lab import RolloutLab
    from asyncflow_torch.demo.model import EOS
    from asyncflow_torch.reference import HuggingFacePolicy, tiny_model
    from asyncflow_vllm.rollout import VllmEngine

    folder = tiny_model(
        tmp_path_factory.mktemp("tied"), ends=True, tie_word_embeddings=True, max_position_embeddings=512
    )
    lab = RolloutLab(VllmEngine, HuggingFacePolicy(folder), OPTIONS, limit_s=240.0)
    defaults = {"top_k": 1, "repetition_penalty": 3.0, "temperature": 0.1, "max_new_tokens": 1, "eos_token_id": EOS}
    Path(folder, "generation_config.json").write_text(json.dumps(defaults))  # of which only the last may count
    lab.start()
    yield lab
    lab.close()
