"""What plain transformers generates from the folders of a run, beside its evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import asyncflow_sdk as af


def generated(folder: Path, prompt: Sequence[int], tokens: int) -> list[int]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    # The penalty that the folder asks for is none of the policy's.
    out = model.generate(torch.tensor([prompt]), do_sample=False, repetition_penalty=1.0, max_new_tokens=tokens)
    return list(map(int, out[0, len(prompt) :]))


def check_evaluations(run: af.Result, prompts: Sequence[Sequence[int]], tokens: int) -> set[int]:
    """Assert that each evaluation of a version with a folder is greedy, of this version alone, and token for token what
    transformers generates from the folder. Return these versions."""
    from asyncflow_sdk.workflow.loops.record_files import read_batch

    folders = {int(path.name.removeprefix("step-")): path for path in (run.directory / "models").iterdir()}
    both = folders.keys() & {each.version for each in run.evaluations}
    for version in both:
        batch = read_batch(run.directory / "evaluations" / f"{version:06d}.safetensors")
        rows = dict(
            zip(map(tuple, batch.ragged("prompt_ids").tolist()), batch.ragged("response_ids").tolist(), strict=True)
        )
        assert rows == {tuple(prompt): generated(folders[version], prompt, tokens) for prompt in prompts}
        assert {int(span[0]) for spans in batch.ragged("version_spans") for span in spans} == {version}
    return set(both)
