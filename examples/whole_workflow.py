"""A whole run as data: your model folder, your prompts, your reward function.

python examples/whole_workflow.py MODEL_FOLDER DATA.jsonl OUT_DIRECTORY [STEPS]

DATA.jsonl has one object a line with "prompt" and whatever columns the reward function names, here "answer".
"""

import sys

import asyncflow_sdk as af


def exact_match(response: list[str], answer: list[str]) -> list[float]:
    return [float(text == right) for text, right in zip(response, answer, strict=True)]


def main(model: str, data: str, out: str, steps: int = 200) -> None:
    workflow = af.Workflow(
        prompts=data,
        rollout=af.Rollout("transformers", model=model, group_size=8, sampling=af.Sampling(max_tokens=7)),
        reward=exact_match,
        train=af.Train("torch", model=model, algorithm=af.GRPO(), learning_rate=1e-5),
        batch_size=64,
        steps=steps,
        staleness=af.Staleness(max_staleness=1),
    )
    with af.LiveView(steps, "my run") as view:
        result = workflow.run(out, on_event=view)
    first, last = result.rewards
    print(f"reward {first:.3f} -> {last:.3f}; report: {af.write_report(result.directory)}")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:4], *map(int, sys.argv[4:5]))
