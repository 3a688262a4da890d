"""TRL's GRPOTrainer on the demo's start and task, under an interpreter that has TRL.

``.venv-trl/bin/python benchmarks/trl_loop.py MODEL STEPS SEED DATA.json`` prints one JSON object.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PROMPTS, GROUP = 32, 8


def main(folder: str, steps: int, seed: int, data: str) -> None:
    torch.set_num_threads(1)
    rewards: list[float] = []
    record: list[dict[str, float]] = []

    def exact_match(completions: list[str], answer: list[str], **_: object) -> list[float]:
        values = [float(text == right) for text, right in zip(completions, answer, strict=True)]
        rewards.append(sum(values) / len(values))
        return values

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: object, **__: object) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *_: object, **__: object) -> None:
            record.append({"reward": rewards[-1], "at_s": time.perf_counter() - self.began})

    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out, use_cpu=True, seed=seed, max_steps=steps, per_device_train_batch_size=PROMPTS * GROUP,
            num_generations=GROUP, max_completion_length=7, temperature=1.0, beta=0.0, epsilon=0.2, epsilon_high=0.28,
            loss_type="dapo", learning_rate=2e-4, lr_scheduler_type="constant", adam_beta1=0.9, adam_beta2=0.95,
            weight_decay=0.0, max_grad_norm=1.0, bf16=False, gradient_checkpointing=False, logging_strategy="no",
            save_strategy="no", report_to="none", disable_tqdm=True, shuffle_dataset=False,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(folder),
            reward_funcs=exact_match,
            args=config,
            train_dataset=Dataset.from_dict(json.loads(Path(data).read_text())),
            callbacks=[Clock()],
        )
        trainer.train()
    print(json.dumps({"steps": record}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
