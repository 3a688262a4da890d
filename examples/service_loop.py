"""Your own trainer behind five calls: the service interface of the AsyncFlow paper.

python examples/service_loop.py MODEL_FOLDER DATA.jsonl OUT_DIRECTORY
"""

import sys

import asyncflow_sdk as af
from asyncflow_torch.train import TorchEngine


def exact_match(response: list[str], answer: list[str]) -> list[float]:
    return [float(text == right) for text, right in zip(response, answer, strict=True)]


def main(model: str, data: str, out: str) -> None:
    engine = TorchEngine(model, algorithm=af.GRPO(), learning_rate=1e-5)
    with af.serve(out, max_staleness=1, steps=2) as run, af.Trainer(run, timeout_s=120) as trainer:
        rollout = af.Rollout("transformers", model=model, group_size=8, sampling=af.Sampling(max_tokens=7))
        reward = af.Stage(exact_match, task="reward", gives=["reward"])
        trainer.init_engines(rollout, reward, batch_size=64)
        trainer.put_prompts_data(data, group_size=8, key="epoch-0")
        for _ in range(2):
            step = trainer.get_experience_data()
            result = engine.train_step(step)
            version = trainer.weight_sync_notify(engine.named_weights(), untrained=engine.untrained)
            trainer.put_experience_data(step, filtered=result.filtered)
            print(f"step {step.index}: reward {result.metrics['reward']:.3f}, version {version}", flush=True)
        print(run.audit())


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:4])
