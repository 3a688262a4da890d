"""On-policy distillation: the student answers, a teacher says how likely it finds each token, and that is the reward.

python examples/distillation.py STUDENT_FOLDER TEACHER_FOLDER DATA.jsonl OUT_DIRECTORY [STEPS]

The teacher is a stage: a train engine with weights that stay as they are. Teacher and student share a tokenizer.
"""

import sys

import numpy as np

import asyncflow_sdk as af


def closeness(teacher_logprobs: af.Ragged, logprobs: af.Ragged) -> np.ndarray:
    """Minus the reverse Kullback-Leibler divergence from student to teacher, by one sample a row, mean over its tokens."""
    gaps = teacher_logprobs.values - logprobs.values
    return np.add.reduceat(gaps, logprobs.offsets[:-1]) / logprobs.lengths


def main(student: str, teacher: str, data: str, out: str, steps: int = 100) -> None:
    workflow = af.Workflow(
        prompts=data,
        rollout=af.Rollout(
            "transformers", model=student, group_size=8, sampling=af.Sampling(max_tokens=7), threads=1
        ),
        stages=[
            af.Stage(af.Logprobs("torch", model=teacher, threads=1), gives=["teacher_logprobs"]),
            af.Stage(closeness, task="reward"),
        ],
        train=af.Train("torch", model=student, learning_rate=3e-4, threads=1),
        batch_size=64,
        steps=steps,
    )
    print(workflow)
    first, last = workflow.run(out).rewards
    print(f"closeness to the teacher {first:.3f} -> {last:.3f}")


if __name__ == "__main__":
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    main(*sys.argv[1:5], *map(int, sys.argv[5:6]))
