"""The whole loop in one file, to copy and change: a queue, a publisher, and two functions of plain transformers and PyTorch.

python examples/one_file_loop.py MODEL_FOLDER DATA.jsonl OUT_DIRECTORY

``roll_out`` generates in a process of its own, while ``train_step`` trains in this one. No engine plugin takes part. DATA.jsonl
has one object a line with "prompt" and "answer". Names end in their dimensions: _R rows, _G groups, _P prompt tokens and
_T response tokens (both padded to the longest), _V vocabulary.
"""

import multiprocessing
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import asyncflow_sdk as af

GROUP, ROWS, MAX_TOKENS = 8, 64, 7  # responses to a prompt, rows of a step, tokens of a response
GIVES = ("response_ids", "logprobs", "version_spans", "reward")


def exact_match(response: list[str], answer: list[str]) -> list[float]:
    return [float(text == right) for text, right in zip(response, answer, strict=True)]


def load(folder: str):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def padded(rows: af.Ragged, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows as a tensor, and a mask of what is no padding."""
    mask = af.Ragged(np.ones(len(rows.values), bool), rows.offsets)
    return torch.from_numpy(rows.padded(side=side)), torch.from_numpy(mask.padded(side=side))


def logprobs_of(logits_RTV: torch.Tensor, ids_RT: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits_RTV.float(), -1).gather(-1, ids_RT[..., None])[..., 0]


def roll_out(address: str, folder: str) -> None:
    """Generate with the newest weights, score and write, until the stream ends."""
    model, tokenizer = load(folder), AutoTokenizer.from_pretrained(folder)
    with af.connect(address, name="rollout") as run, run.weight_updates() as updates:
        versions, version = iter(updates), -1
        while True:
            try:
                batch = run.queue.get("rollout", ROWS, timeout_s=3600) if version >= 0 else None
            except af.VersionNeeded:  # the staleness rule requires a newer version first
                batch = None
            except af.Ended:
                return
            if batch is None:
                with next(versions) as update:  # waits for the newest version; the end of the block commits it
                    model.load_state_dict(dict(update))
                version = update.version
                continue
            with batch:  # after an exception, others get these rows
                prompts_RP, mask_RP = padded(batch.ragged("prompt_ids"), "left")
                out = model.generate(
                    prompts_RP,
                    attention_mask=mask_RP.long(),
                    max_new_tokens=MAX_TOKENS,
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    top_p=1.0,
                    return_dict_in_generate=True,
                    output_logits=True,
                )
                ids_RT = out.sequences[:, prompts_RP.shape[1] :]
                logprobs_RT = logprobs_of(torch.stack(out.logits, 1), ids_RT)
                ends_RT = (ids_RT == tokenizer.eos_token_id).long()
                keep_RT = ends_RT.cumsum(1) - ends_RT == 0  # all up to the first end token
                responses = [ids[keep].numpy() for ids, keep in zip(ids_RT, keep_RT, strict=True)]
                texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
                batch.complete(
                    {
                        "response_ids": responses,
                        "logprobs": [row[keep].numpy() for row, keep in zip(logprobs_RT, keep_RT, strict=True)],
                        "version_spans": [[[version, 0, len(ids)]] for ids in responses],
                        "reward": exact_match(texts, batch.texts("answer")),
                    }
                )


def train_step(model, optimizer: torch.optim.Optimizer, step: af.LeasedBatch) -> float:
    """Make one step of GRPO with clipped ratios (arXiv 2402.03300, eq. 3, mean over tokens); return the mean reward."""
    reward_R = step.array("reward")
    _, group_R = np.unique(step.groups, return_inverse=True)
    centred_R = reward_R - (np.bincount(group_R, reward_R) / np.bincount(group_R))[group_R]
    spread_G = np.sqrt(np.bincount(group_R, centred_R**2) / np.bincount(group_R))
    advantages_R = torch.from_numpy(centred_R / (spread_G[group_R] + 1e-4))

    prompts_RP, prompt_mask_RP = padded(step.ragged("prompt_ids"), "left")
    ids_RT, mask_RT = padded(step.ragged("response_ids"), "right")
    behaviour_RT, _ = padded(step.ragged("logprobs"), "right")
    mask = torch.cat([prompt_mask_RP, mask_RT], 1).long()
    logits = model(
        torch.cat([prompts_RP, ids_RT], 1), attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)
    ).logits
    ratio_RT = (logprobs_of(logits[:, prompts_RP.shape[1] - 1 : -1], ids_RT) - behaviour_RT).exp()
    surrogate_RT = torch.minimum(ratio_RT * advantages_R[:, None], ratio_RT.clamp(0.8, 1.28) * advantages_R[:, None])
    optimizer.zero_grad()
    (-surrogate_RT[mask_RT].mean()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(reward_R.mean())


def main(folder: str, data: str, out: str) -> None:
    model, tokenizer, prompts = load(folder), AutoTokenizer.from_pretrained(folder), af.load_prompts(data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    with af.serve(out, max_staleness=1) as run, run.weight_publisher() as publisher:
        run.queue.declare("rollout", needs=["prompt_ids", "answer"], gives=GIVES, admits=True)
        steps = run.consumer("train", needs=("prompt_ids", *GIVES), batch_size=ROWS, timeout_s=600)
        publisher.publish(0, model.state_dict())
        ids = tokenizer(prompts.texts("prompt"))["input_ids"]
        run.queue.put({"prompt_ids": ids, "answer": prompts.texts("answer")}, group_size=GROUP, key="epoch-0")
        run.queue.end()
        spawn = multiprocessing.get_context("spawn")
        rollout = spawn.Process(target=roll_out, args=(run.address, folder), daemon=True)
        rollout.start()  # as many of them as you like
        for step in steps:
            reward = train_step(model, optimizer, step)
            publisher.publish(step.version + 1, model.state_dict())  # returns once the weights are copied
            step.ack()
            print(f"step {step.index}: reward {reward:.3f}", flush=True)
        rollout.join()
        print(run.audit())


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:4])
