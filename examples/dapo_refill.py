"""DAPO's dynamic sampling (arXiv 2503.14476, section 3.2): groups whose scores are all alike teach nothing. They are
dropped as soon as they are scored, and the next prompts take their place, so that every step is full of groups that do.

python examples/dapo_refill.py MODEL_FOLDER DATA.jsonl OUT_DIRECTORY [STEPS]
"""

import sys

import asyncflow_sdk as af


def share_right(response: list[str], answer: list[str]) -> list[float]:
    """The share of characters that stand where they should."""
    return [
        sum(a == b for a, b in zip(text, right, strict=False)) / len(right)
        for text, right in zip(response, answer, strict=True)
    ]


def main(model: str, data: str, out: str, steps: int = 100) -> None:
    result = af.Workflow(
        prompts=data,
        rollout=af.Rollout("transformers", model=model, group_size=4, sampling=af.Sampling(max_tokens=7), threads=1),
        stages=[af.Stage(share_right, task="score"), af.Stage(af.dynamic_sampling, gives=["reward"])],
        train=af.Train(
            "torch", model=model, algorithm=af.DAPO(drop_zero_advantage=False), learning_rate=1e-5, threads=1
        ),
        batch_size=32,
        steps=steps,
    ).run(out)
    rows = result.summary["rows"]
    print(f"{result.summary['steps']} full steps; rows consumed {rows['consumed']}, filtered {rows['filtered']}")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:4], *map(int, sys.argv[4:5]))
