"""Parts only, each in a process of your own: a Producer, a Stage, a Consumer, and a queue between them.

python examples/own_parts.py MODEL_FOLDER DATA.jsonl OUT_DIRECTORY

DATA.jsonl has one object a line with "prompt" and "answer". ``own_loop.py`` has the same run with workers that the SDK
starts and watches; here nothing is started for you, so the parts may be anywhere: threads, processes, other hosts.
"""

import multiprocessing
import sys

import asyncflow_sdk as af
from asyncflow_torch.rollout import TransformersEngine
from asyncflow_torch.train import TorchEngine


def exact_match(response: list[str], answer: list[str]) -> list[float]:
    return [float(text == right) for text, right in zip(response, answer, strict=True)]


def roll_out(address: str, model: str) -> None:
    with af.connect(address, name="my-rollout") as run:
        engine = TransformersEngine(model, threads=1)
        af.EngineProducer(run.queue, engine, prompt="prompt", text=model, sampling=af.Sampling(max_tokens=7)).work()


def reward(address: str) -> None:
    with af.connect(address, name="my-reward") as run:
        af.Stage(exact_match, task="reward").run(run.queue)


def main(model: str, data: str, out: str) -> None:
    engine = TorchEngine(model, algorithm=af.GRPO(), learning_rate=1e-5, threads=1)
    with af.serve(out, max_staleness=1) as run:
        spawn = multiprocessing.get_context("spawn")
        parts = [spawn.Process(target=roll_out, args=(run.address, model))]
        parts += [spawn.Process(target=reward, args=(run.address,))]
        for part in parts:
            part.start()
        run.queue.declare("train", needs=af.TRAIN_COLUMNS, batch_rows=64, lease_s=3600.0)
        run.queue.put(af.load_prompts(data), group_size=8)
        run.queue.end()
        weights = run.weight_publisher("shm")
        for step in run.queue.stream("train", timeout_s=60.0):
            result = engine.train_step(step)
            weights.publish(step.version + 1, engine.named_weights(), untrained=engine.untrained)
            step.ack(filtered=result.filtered)
            print(f"step {step.index}: reward {result.metrics['reward']:.3f}", flush=True)
        for part in parts:
            part.join()
        print(run.audit())


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:4])
