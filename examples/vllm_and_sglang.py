"""vLLM and SGLang at once: neither can be installed beside the other, both generate for one trainer.

python examples/vllm_and_sglang.py VLLM_PYTHON SGLANG_PYTHON OUT_DIRECTORY [STEPS] [MODEL_FOLDER]

Each rollout runs under the interpreter that has its engine. Both answer the same task, so whoever is free takes the next prompts;
what either of them computes from a version is compared with the trainer before it generates. Without a model folder, one is warmed up for
the task: reversing five digits.
"""

import sys
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


def main(vllm: str, sglang: str, out: str, steps: int = 200, model: str = "") -> None:
    if not model:
        model = str(Path(out) / "start")
        warm_up(Path(model), seed=0)
    common = {"model": model, "group_size": 8, "sampling": af.Sampling(max_tokens=7), "env": {"OMP_NUM_THREADS": "1"}}
    workflow = af.Workflow(
        prompts=prompts(8 * steps, seed=0),
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
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:4], *map(int, sys.argv[4:5]), *sys.argv[5:6])
