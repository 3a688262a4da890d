"""Two different rollout engines in one run: transformers, and one of your own that no plugin registers.

python examples/two_engines.py MODEL_FOLDER DATA.jsonl OUT_DIRECTORY [STEPS]

Both answer the same task, so whoever is free takes the next prompts, and each gets every new version of the weights.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator

import torch
from transformers import AutoModelForCausalLM

import asyncflow_sdk as af
from asyncflow_sdk.types.events import Event, Span


class Plain(af.RolloutEngine):
    """Draws all responses of a request together, and computes every token anew: as simple as an engine can be."""

    capabilities = af.Capabilities(max_rows=16)

    def __init__(self, model: str) -> None:
        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(model, trust_remote_code=False).eval()
        self.end = self.model.generation_config.eos_token_id
        self.lock = asyncio.Lock()

    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        async with self.lock:  # one forward pass at a time
            tokens, logprobs = await asyncio.to_thread(self.draw, request)
        for index, (ids, scores) in enumerate(zip(tokens, logprobs, strict=True)):
            ended = ids.index(self.end) + 1 if self.end in ids else len(ids)
            yield af.Completion(index, token_ids=ids[:ended], logprobs=scores[:ended])

    @torch.inference_mode()
    def draw(self, request: af.Request) -> tuple[list[list[int]], list[list[float]]]:
        ids = torch.tensor(request.prompt_ids, dtype=torch.long).repeat(request.n, 1)
        scores = torch.empty(request.n, 0)
        for _ in range(request.sampling.max_tokens):
            drawn_from = self.model(input_ids=ids).logits[:, -1].log_softmax(-1)
            token = torch.multinomial(drawn_from.exp(), 1)
            ids, scores = torch.cat([ids, token], 1), torch.cat([scores, drawn_from.gather(1, token)], 1)
        return ids[:, len(request.prompt_ids) :].tolist(), scores.tolist()

    async def load_weights(self, update: af.WeightUpdate) -> set[str]:  # nothing is running
        tensors = {name: tensor.clone() for name, tensor in update}
        self.model.load_state_dict(tensors, strict=False)  # which names were taken is compared by the caller
        return set(tensors)


def exact_match(response: list[str], answer: list[str]) -> list[float]:
    return [float(text == right) for text, right in zip(response, answer, strict=True)]


def main(model: str, data: str, out: str, steps: int = 100) -> None:
    sampling = af.Sampling(max_tokens=7)
    workflow = af.Workflow(
        prompts=data,
        rollout=[
            af.Rollout("transformers", model=model, group_size=8, sampling=sampling, max_rows=16, threads=1),
            af.Rollout("two_engines:Plain", model=model, group_size=8, sampling=sampling),  # this very file
        ],
        reward=exact_match,
        train=af.Train("torch", model=model, learning_rate=1e-5, threads=1),
        batch_size=64,
        steps=steps,
        weights=af.Weights(
            quorum=2
        ),  # a version is loaded when both have it: whoever starts faster does not go on alone
    )
    print(workflow)
    rows: Counter[str] = Counter()

    def count(event: Event) -> None:
        if isinstance(event, Span) and event.kind == "generate":
            rows[event.worker] += event.rows

    result = workflow.run(out, on_event=count)
    print(f"{result.summary['steps']} steps; rows by each engine: {dict(sorted(rows.items()))}")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:4], *map(int, sys.argv[4:5]))
