"""Your own training loop that trains each step in parts, while the rest of the step is still being generated.

python examples/streamed_step.py MODEL_FOLDER DATA.jsonl OUT_DIRECTORY

DATA.jsonl has one object a line with "prompt" and "answer". The gradient is that of the whole step.
"""

import sys

import asyncflow_sdk as af
from asyncflow_torch.train import TorchEngine


def exact_match(response: list[str], answer: list[str]) -> list[float]:
    return [float(text == right) for text, right in zip(response, answer, strict=True)]


def main(model: str, data: str, out: str, group_size: int = 8, batch_size: int = 64) -> None:
    engine = TorchEngine(model, algorithm=af.GRPO(), learning_rate=1e-5)
    assert not engine.whole_step, engine.whole_step  # why this engine, algorithm or option needs whole steps
    sampling = af.Sampling(max_tokens=7)
    with af.serve(out, max_staleness=1) as run:
        run.queue.put(af.load_prompts(data), group_size=group_size, key="epoch-0")
        run.queue.end()
        run.start(af.Rollout("transformers", model=model, group_size=group_size, max_rows=16, sampling=sampling))
        run.start(af.Stage(exact_match, task="reward", gives=["reward"]))
        weights = run.weight_publisher("shm")
        for step in run.consumer("train", batch_size=batch_size, part_rows=group_size):
            engine.begin_step(step.index)
            parts = 0
            try:
                for part in step.parts():  # each as soon as its groups have their rewards
                    engine.accumulate(part)
                    parts += 1
            except af.LeaseLost:  # a row of a part was removed: the queue delivers the step again
                engine.abort_step()
                continue
            result = engine.end_step()
            weights.publish(step.version + 1, engine.named_weights(), untrained=engine.untrained)
            step.ack(filtered=result.filtered)
            print(f"step {step.index}: reward {result.metrics['reward']:.3f}, in {parts} parts", flush=True)
        print(run.audit())


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:4])
