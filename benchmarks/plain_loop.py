"""The plain synchronous GRPO loop: generate, then train, in one process, in plain PyTorch and transformers.

The baseline the demo is measured against; it uses nothing of the SDK but the demo's data and reward.
``python -m benchmarks.plain_loop MODEL STEPS SEED THREADS`` prints one JSON object.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, DynamicCache

from asyncflow_torch.demo.task import exact_match, prompts
from asyncflow_torch.generation import kv

PROMPTS, GROUP, NEW, PAD, EOS = 32, 8, 7, 0, 2
CLIP_LOW, CLIP_HIGH, LR = 0.2, 0.28, 2e-4


@torch.no_grad()
def generate(model: torch.nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sample NEW tokens after equally long prompts: tokens, log-probs, mask."""
    rows = len(ids)
    tokens = torch.full((rows, NEW), PAD)
    logprobs, mask = torch.zeros(rows, NEW), torch.zeros(rows, NEW)
    done = torch.zeros(rows, dtype=torch.bool)
    cache, step = DynamicCache(config=model.config), ids
    for t in range(NEW):
        out = model(input_ids=step, use_cache=True, logits_to_keep=1, **kv.as_argument(model, cache))
        logp = out.logits[:, -1].float().log_softmax(-1)
        drawn = torch.multinomial(logp.exp(), 1)[:, 0]
        tokens[:, t] = torch.where(done, PAD, drawn)
        logprobs[:, t] = logp.gather(1, drawn[:, None])[:, 0] * ~done
        mask[:, t] = (~done).float()
        done |= drawn == EOS
        if done.all():
            break
        step = drawn[:, None]
    return tokens, logprobs, mask


def main(folder: str, steps: int, seed: int, threads: int) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, betas=(0.9, 0.95))
    data = prompts(PROMPTS * steps, seed)
    record = []
    began = time.perf_counter()
    for step in range(steps):
        start = time.perf_counter()
        rows = slice(step * PROMPTS, (step + 1) * PROMPTS)
        ids = torch.tensor([tokenizer.encode(text).ids for text in data["prompt"][rows]])
        ids = ids.repeat_interleave(GROUP, 0)
        tokens, behaviour, mask = generate(model, ids)
        texts = tokenizer.decode_batch(tokens.tolist())
        answers = [answer for answer in data["answer"][rows] for _ in range(GROUP)]
        rewards = torch.tensor(exact_match(texts, answers))
        generated = time.perf_counter()
        grouped = rewards.view(PROMPTS, GROUP)
        advantage = ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)).flatten()
        keep = advantage.abs() > 1e-6
        if keep.any():
            full = torch.cat([ids, tokens], 1)[keep]
            attention = torch.cat([torch.ones_like(ids), mask.long()], 1)[keep]
            width = ids.shape[1]
            logits = (
                model(input_ids=full, attention_mask=attention, use_cache=False).logits[:, width - 1 : -1].float()
            )
            logp = logits.log_softmax(-1).gather(2, tokens[keep][..., None])[..., 0]
            ratio = (logp - behaviour[keep]).exp()
            weight = advantage[keep][:, None]
            gain = torch.min(ratio * weight, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * weight)
            loss = -(gain * mask[keep]).sum() / mask[keep].sum()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        end = time.perf_counter()
        record.append(
            {
                "reward": rewards.mean().item(),
                "generate_s": generated - start,
                "train_s": end - generated,
                "at_s": end - began,
            }
        )
    print(json.dumps({"steps": record}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
