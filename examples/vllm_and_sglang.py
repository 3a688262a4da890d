"""vLLM and SGLang at once: neither can be installed beside the other, both generate for one trainer.

python examples/vllm_and_sglang.py VLLM_PYTHON SGLANG_PYTHON --steps 200      # --out, --model, ... as `asyncflow demo`

Each rollout runs under the interpreter that has its engine. Both answer the same task, so whoever is free takes the next prompts;
what either of them computes from a version is compared with the trainer before it generates. Without a model folder, one is warmed up for
the task: reversing five digits.
"""

import argparse
import time
from collections import Counter
from pathlib import Path

import torch

import asyncflow_sdk as af
from asyncflow_sdk.types.events import Event, Loaded, Span
from asyncflow_torch.demo.model import warm_up
from asyncflow_torch.demo.task import exact_match, prompts

PROBE = af.Probe(prompt_ids=((5, 6, 7, 8, 9, 14),), response_ids=((9, 8, 7, 6, 5, 2),))
VLLM, SGLANG = {}, {}
if not torch.cuda.is_available():
    VLLM = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 128 << 20, "max_rows": 32}
    SGLANG = {
        "max_rows": 32,
        "server": {
            "device": "cpu", "dtype": "float32", "attention_backend": "torch_native", "sampling_backend": "pytorch",
            "max_total_tokens": 8192, "max_running_requests": 32, "mem_fraction_static": 0.5, "sleep_on_idle": True,
        },
    }  # fmt: skip


def main(
    vllm: str, sglang: str, out: Path, steps: int, seed: int, max_staleness: int, staleness_policy: str, model: Path | None
) -> None:  # fmt: skip
    if model is None:
        model = out / "start"
        warm_up(model, seed=seed)
    common = {"model": model, "group_size": 8, "sampling": af.Sampling(max_tokens=7), "env": {"OMP_NUM_THREADS": "1"}}
    workflow = af.Workflow(
        prompts=prompts(8 * steps, seed=seed),
        rollout=[
            af.Rollout("vllm", python=vllm, **common, **VLLM),
            af.Rollout("sglang", python=sglang, **common, **SGLANG),
        ],
        reward=exact_match,
        train=af.Train("torch", model=model, algorithm=af.GRPO(), learning_rate=2e-4, threads=1),
        weights=af.Weights(
            probe=PROBE, verify=["probe"], quorum=2
        ),  # no version is loaded before both engines have it
        batch_size=64,
        steps=steps,
        staleness=af.Staleness(max_staleness=max_staleness, policy=staleness_policy),
        seed=seed,
    )
    print(workflow)
    rows: Counter[str] = Counter()
    versions: Counter[str] = Counter()

    def count(event: Event) -> None:
        if isinstance(event, Span) and event.kind == "generate":
            rows[event.worker] += event.rows
        elif isinstance(event, Loaded):
            versions[event.worker] += 1

    result = workflow.run(out, on_event=count)
    first, last = result.summary["reward_first"], result.summary["reward_last"]
    print(f"{result.summary['steps']} steps, reward {first:.3f} to {last:.3f}")
    print(
        f"rows by each engine: {dict(sorted(rows.items()))}; versions proven by each: {dict(sorted(versions.items()))}"
    )


if __name__ == "__main__":
    given = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    given.add_argument("vllm", help="interpreter of vLLM")
    given.add_argument("sglang", help="interpreter of SGLang")
    given.add_argument("--out", type=Path, default=Path("runs") / time.strftime("both-%Y%m%d-%H%M%S"))
    given.add_argument("--steps", type=int, default=200)
    given.add_argument("--seed", type=int, default=0)
    given.add_argument("--max-staleness", type=int, default=1)
    given.add_argument("--staleness-policy", default="wait")
    given.add_argument("--model", type=Path, help="Hugging Face folder to start from, without warm-up")
    main(**vars(given.parse_args()))
