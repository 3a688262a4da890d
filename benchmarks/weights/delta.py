"""A real model's updates, encoded: ``python -m benchmarks.weights.delta '{"millions": 40, "steps": 16}'``.

A Llama with new weights, fp32 masters and Adam (learning_rate 1e-6) takes policy-gradient steps on samples of its own, each with
an advantage of 1 or -1. After each step the bfloat16 weights are encoded bucket by bucket against those before, and decoded.
The last line printed is JSON, of the last half of the steps (Adam's running means have settled): size and changed elements in
percent of full, GB/s of full weights by one core, and what the last step moved by transport tcp, in percent of full.
"""

from __future__ import annotations

import json
import math
import statistics as st
import sys
import tempfile
import time
from typing import Any

import numpy as np
import torch

import asyncflow_sdk as af
from asyncflow_sdk.types import events as ev
from asyncflow_sdk.types.manifest import BUCKET_BYTES
from asyncflow_sdk.weights import host
from asyncflow_sdk.weights.transports import delta

LR = 1e-6
VOCABULARY = 2048
LAYERS = 8
TOKENS, PROMPTS = 48, 4
Bytes = np.ndarray


def model(millions: float) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden = max(round(math.sqrt(millions * 1e6 / LAYERS / 12.25) / 64) * 64, 64)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=11 * hidden // 4, num_hidden_layers=LAYERS,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64, max_position_embeddings=256,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def train(policy: Any, optimizer: torch.optim.Optimizer, random: torch.Generator) -> None:
    """One step."""
    tokens = torch.randint(VOCABULARY, (PROMPTS, TOKENS), generator=random)
    advantage = torch.randint(2, (PROMPTS, 1), generator=random) * 2.0 - 1
    logits = policy(input_ids=tokens).logits[:, :-1]
    taken = torch.distributions.Categorical(logits=logits.detach()).sample()
    logprobs = torch.log_softmax(logits, -1).gather(-1, taken[..., None])[..., 0]
    (-(advantage * logprobs).mean()).backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def published(policy: Any) -> Bytes:
    """All weights in bfloat16, one after another."""
    with torch.no_grad():
        return torch.cat([p.to(torch.bfloat16).view(-1) for p in policy.parameters()]).view(torch.uint8).numpy()


def coded(new: Bytes, base: Bytes) -> dict[str, float]:
    """Through the codec and back. Raises RuntimeError where something else comes out."""
    size, encode_s, decode_s = 0, 0.0, 0.0
    out = np.ones(BUCKET_BYTES, np.uint8)
    for start in range(0, len(new), BUCKET_BYTES):
        part = slice(start, min(start + BUCKET_BYTES, len(new)))
        began = time.perf_counter()
        code = delta.encode(new[part], base[part], 2)
        done = time.perf_counter()
        encode_s += done - began
        if code is None:
            size += part.stop - part.start
            continue
        into = out[: part.stop - part.start]
        done = time.perf_counter()
        delta.apply(code, base[part], into)
        decode_s += time.perf_counter() - done
        size += len(code)
        if not np.array_equal(into, new[part]):
            raise RuntimeError("a bucket did not come back as it was")
    changed = np.count_nonzero(new.view(np.uint16) != base.view(np.uint16)) * 2
    return {
        "percent": 100 * size / len(new), "changed": 100 * changed / len(new),
        "encode_gb_s": len(new) / encode_s / 1e9, "decode_gb_s": len(new) / max(decode_s, 1e-9) / 1e9,
    }  # fmt: skip


def moved(before: Bytes, after: Bytes) -> float:
    """Percent of full that transport tcp moves to a replica that has ``before``. Raises RuntimeError where it was no delta."""
    said: list[ev.WeightState] = []
    host.identity = lambda: ""  # nothing is mapped

    def listen(event: ev.Event) -> None:
        if isinstance(event, ev.WeightState):
            said.append(event)

    with (
        tempfile.TemporaryDirectory() as folder,
        af.serve(folder, on_event=listen) as run,
        run.weight_publisher("tcp") as publisher,
        af.connect(folder) as there,
    ):
        updates = iter(there.weight_updates(timeout_s=60))
        for version, weights in enumerate((before, after), 1):
            publisher.publish(version, [("weights", torch.from_numpy(weights).view(torch.bfloat16))])
            with next(updates) as update:
                ((_, got),) = update
            if not torch.equal(got.view(torch.uint8), torch.from_numpy(weights)):
                raise RuntimeError("a version did not arrive as it was sent")
            del got, update
        last = next(event for event in reversed(said) if event.state == "staged")
    if last.encoding != "delta":
        raise RuntimeError(f"version {last.version} came by {last.encoding}")
    return 100 * last.moved / len(after)


def measure(millions: float, steps: int) -> dict[str, float]:
    torch.set_num_threads(1)
    policy = model(millions)
    optimizer = torch.optim.Adam(policy.parameters(), lr=LR)
    random = torch.Generator().manual_seed(1)
    base, found = published(policy), []
    for _ in range(steps):
        train(policy, optimizer, random)
        before, base = base, published(policy)
        found.append(coded(base, before))
    settled = found[steps // 2 :]
    result = {name: st.median(each[name] for each in settled) for name in settled[0]}
    return {**result, "first_percent": found[0]["percent"], "moved": moved(before, base), "parameters": len(base) / 2}


if __name__ == "__main__":
    print(json.dumps(measure(**json.loads(sys.argv[1]))))
