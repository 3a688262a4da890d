"""Data, rewards, evaluation and checkpoints in ten lines: what a user of TRL writes, here.

python examples/ten_lines.py MODEL_FOLDER DATA.jsonl OUT_DIRECTORY [STEPS]

The last eight lines of DATA.jsonl are held out for the evaluation.
"""

import json
import sys
from pathlib import Path

import asyncflow_sdk as af


def accuracy(response: list[str], answer: list[str]) -> list[float]:
    return [float(text == right) for text, right in zip(response, answer, strict=True)]


def digits(response: list[str]) -> list[float]:
    return [float(text.isdigit()) for text in response]


def main(model: str, data: str, out: str, steps: int = 40) -> None:
    records = [json.loads(line) for line in Path(data).read_text().splitlines()]
    every = max(steps // 4, 1)
    result = af.Workflow(
        prompts=records[:-8],  # or the path of a file, a datasets.Dataset, chats
        rollout=af.Rollout("transformers", model=model, group_size=8, sampling=af.Sampling(max_tokens=7)),
        reward=[accuracy, (digits, 0.2)],
        train=af.Train("torch", model=model, learning_rate=1e-4, lr_scheduler_type="cosine", warmup_ratio=0.1),
        evaluate=af.Evaluation(prompts=records[-8:], every=every, reward=accuracy),
        batch_size=64,
        steps=steps,
        save_steps=every,
    ).run(out)
    print("reward {:.3f} -> {:.3f}".format(*result.rewards))
    for each in result.evaluations:
        print(f"version {each.version} scored {each.score:.3f}{', the best so far' if each.best else ''}")
    print(f"the best version: {result.directory / 'best'}")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:4], *map(int, sys.argv[4:5]))
