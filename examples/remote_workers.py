"""Remote workers by hand: a run served over tcp with keys, and its workers started by one command each, as on other hosts.

python examples/remote_workers.py MODEL_FOLDER DATA.jsonl OUT_DIRECTORY

Here the commands run on this host; on another, copy OUT_DIRECTORY/run.key there and run the same.
"""

import os
import subprocess
import sys
from pathlib import Path

import asyncflow_sdk as af
from asyncflow_torch.train import TorchEngine

ASYNCFLOW = [sys.executable, "-m", "asyncflow_sdk.cli"]


def exact_match(response: list[str], answer: list[str]) -> list[float]:
    return [float(text == right) for text, right in zip(response, answer, strict=True)]


def main(model: str, data: str, out: str, group_size: int = 8, batch_size: int = 64, steps: int = 2) -> None:
    engine = TorchEngine(model, algorithm=af.GRPO(), learning_rate=1e-5)
    with af.serve(out, address="tcp://0.0.0.0:0", steps=steps) as run:  # for other hosts
        address = run.address.replace("0.0.0.0", "127.0.0.1")  # on another host: the name of this one
        come = [*ASYNCFLOW, "worker", address, "--key", str(Path(out, "run.key").resolve())]
        rollout = ["rollout", "--engine", "transformers", "--model", model, "--max-tokens", "7"]
        reward = [
            "stage",
            "remote_workers:exact_match",
            "--task",
            "reward",
            "--needs",
            "response",
            "--needs",
            "answer",
        ]
        here = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # where this module can be imported from
        workers = [subprocess.Popen([*come, *rollout]), subprocess.Popen([*come, *reward], env=here)]
        run.feed(data, group_size=group_size)
        weights = run.weight_publisher("tcp")
        for step in run.consumer("train", batch_size=batch_size, timeout_s=80):  # says who is missing
            result = engine.train_step(step)
            weights.publish(step.version + 1, engine.named_weights(), untrained=engine.untrained)
            step.ack(filtered=result.filtered)
            print(f"step {step.index}: reward {result.metrics['reward']:.3f}", flush=True)
        for worker in workers:
            print("a worker ended with", worker.wait())  # by itself: the stream has ended
        print(run.audit())


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:4])
