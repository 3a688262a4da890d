"""A model and data for the other examples, made here in some 10 s: a tiny Qwen3 that reverses five digits rightly now and then.

python examples/model_and_data.py OUT_DIRECTORY [ACCURACY] [ROWS]

writes OUT_DIRECTORY/model, a Hugging Face folder with tokenizer, trained until it is right with ACCURACY (0.15), and
OUT_DIRECTORY/data.jsonl with ROWS (256) lines of "prompt" and "answer".
"""

import json
import sys
from pathlib import Path

from asyncflow_torch.demo.model import warm_up
from asyncflow_torch.demo.task import prompts


def main(out: str, accuracy: float = 0.15, rows: int = 256) -> None:
    folder = Path(out)
    step, reached = warm_up(folder / "model", seed=0, target=accuracy)
    columns = prompts(rows, seed=0)
    records = [{"prompt": p, "answer": a} for p, a in zip(columns["prompt"], columns["answer"], strict=True)]
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    print(f"{folder / 'model'}: {step} steps, right with {reached:.2f}")
    print(f"{folder / 'data.jsonl'}: {rows} lines")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*sys.argv[1:2], *map(float, sys.argv[2:3]), *map(int, sys.argv[3:4]))
