"""Multi-turn rollouts: a model that may use a calculator, trained on what it drew and not on what the tool said.

python examples/tool_use.py MODEL_FOLDER DATA.jsonl OUT_DIRECTORY [STEPS]

DATA.jsonl has one object a line with "prompt" and "answer". The agent is in calculator.py beside this file.
"""

import sys

from calculator import solve

import asyncflow_sdk as af


def main(model: str, data: str, out: str, steps: int = 100) -> None:
    rollout = af.Rollout(
        "transformers", model=model, group_size=8, sampling=af.Sampling(max_tokens=6), agent=solve,
        gives=["reward", "calls"], agent_timeout_s=60,
    )  # fmt: skip
    result = af.Workflow(
        prompts=data,
        rollout=rollout,
        train=af.Train("torch", model=model, algorithm=af.GRPO(), learning_rate=1e-5),
        batch_size=64,
        steps=steps,
        staleness=af.Staleness(max_staleness=1),
        weights=af.Weights(swap="boundary"),
    ).run(out)
    drawn = observed = calls = 0
    for _, batch in af.read_steps(result.directory):
        mask = batch.ragged("loss_mask").values
        drawn, observed = drawn + int(mask.sum()), observed + int((~mask).sum())
        calls += int(batch.array("calls").sum())
    print(f"{calls} calls of the calculator: {drawn} tokens drawn and trained, {observed} observed")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:4], *map(int, sys.argv[4:5]))
