"""Your own training loop: the queue, a rollout worker and a reward as parts, and your code in the middle.

python examples/own_loop.py MODEL_FOLDER DATA.jsonl OUT_DIRECTORY

DATA.jsonl has one object a line with "prompt" and "answer".
"""

import sys

import asyncflow_sdk as af
from asyncflow_torch.train import TorchEngine


def exact_match(response: list[str], answer: list[str]) -> list[float]:
    return [float(text == right) for text, right in zip(response, answer, strict=True)]


def main(model: str, data: str, out: str, group_size: int = 8, batch_size: int = 64) -> None:
    engine = TorchEngine(model, algorithm=af.GRPO(), learning_rate=1e-5)
    with af.serve(out, max_staleness=1) as run:
        run.queue.put(af.load_prompts(data), group_size=group_size, key="epoch-0")
        run.queue.end()
        run.start(af.Rollout("transformers", model=model, group_size=group_size, sampling=af.Sampling(max_tokens=7)))
        run.start(af.Stage(exact_match, task="reward", gives=["reward"]))
        weights = run.weight_publisher("shm")
        for step in run.consumer("train", batch_size=batch_size):
            result = engine.train_step(step)
            weights.publish(step.version + 1, engine.named_weights(), untrained=engine.untrained)
            step.ack(filtered=result.filtered)
            print(f"step {step.index}: reward {result.metrics['reward']:.3f}", flush=True)
        print(run.audit())


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:4])
