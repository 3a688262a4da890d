"""CTranslate2Engine: generates with CTranslate2, a C++ inference engine for CPUs and GPUs.

    af.Rollout("ctranslate2", model="models/mine", intra_threads=4)

CTranslate2 loads models from its own files and accepts no new weights. So each version is converted
in memory, where names and shapes are compared with the checkpoint, written below /dev/shm, and
loaded beside the old model, which is then freed. A load needs twice the model's memory, and a
failed one leaves the old version.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import torch
import transformers
from ctranslate2.converters import TransformersConverter

import asyncflow_sdk as af
from asyncflow_sdk.workflow.loops.tokenizer import end_tokens


class CTranslate2Engine(af.RolloutEngine):
    """``model``: a Hugging Face folder of a decoder supported by CTranslate2 (Llama, Mistral, Qwen,
    GPT-2, ...). ``compute_type``: "float32" or another type of CTranslate2. ``device``: "cpu" or
    "cuda". ``intra_threads``: threads of a generation; 0 is CTranslate2's default. ``max_rows``: responses at once.
    ``trust_remote_code``: run the folder's own Python for a model that transformers does not have.

    Requests run one after another, the responses of a request together. Log-probs are computed by
    scoring each response once more, over the whole vocabulary, at the request's temperature.
    """

    def __init__(
        self,
        model: str,
        *,
        compute_type: str = "float32",
        device: str = "cpu",
        intra_threads: int = 0,
        max_rows: int = 64,
        trust_remote_code: bool = False,
    ) -> None:
        self._folder, self._trust = model, {"trust_remote_code": trust_remote_code}
        self._options = {"compute_type": compute_type, "device": device, "intra_threads": intra_threads}
        transformers.utils.logging.disable_progress_bar()
        first = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto", **self._trust)
        self._config, self._ends = first.config, end_tokens(model)
        context = getattr(first.config, "max_position_embeddings", None)
        self.capabilities = af.Capabilities(max_rows=max_rows, context=context, logprobs=True, stop_texts=True)
        self._generator = self._convert(first)

    # ---- generating

    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        prompt = [int(token) for token in request.prompt_ids]
        self._check(prompt, request.sampling.max_tokens)
        stop = threading.Event()
        try:
            for completion in await asyncio.to_thread(self._answer, prompt, request, stop):
                yield completion
        finally:
            stop.set()  # the thread ends with its next token

    def _answer(self, prompt: list[int], request: af.Request, stop: threading.Event) -> list[af.Completion]:
        sampling, generator = request.sampling, self._generator
        ends = [*self._ends, *sampling.stop_ids]
        so_far: list[list[int]] = [[] for _ in range(request.n)]
        watches = [request.watch() for _ in so_far]

        def ended(step: Any) -> bool:
            so_far[step.batch_id].append(step.token_id)
            watch = watches[step.batch_id]
            return stop.is_set() or (watch is not None and watch.found(so_far[step.batch_id]))

        drawn = generator.generate_batch(
            [[str(token) for token in prompt]] * request.n, beam_size=1, include_prompt_in_result=False,
            max_length=sampling.max_tokens, end_token=ends or [self._config.vocab_size], return_end_token=True,
            sampling_topk=sampling.top_k if sampling.temperature else 1, sampling_topp=sampling.top_p,
            sampling_temperature=sampling.temperature or 1.0, callback=ended,
        )  # fmt: skip
        responses = [result.sequences_ids[0] for result in drawn]
        scored = self._score(generator, [prompt] * request.n, responses, sampling.temperature or 1.0)
        return [
            af.Completion(
                index,
                ids,
                logprobs,
                "stop" if ids[-1] in ends or (watch is not None and watch.found(ids)) else "length",
            )
            for index, (ids, logprobs, watch) in enumerate(zip(responses, scored, watches, strict=True))
        ]

    async def logprobs(
        self, prompt_ids: Sequence[Sequence[int]], response_ids: Sequence[Sequence[int]]
    ) -> Sequence[Sequence[float]]:
        return await asyncio.to_thread(self._score, self._generator, prompt_ids, response_ids, 1.0)

    @staticmethod
    def _score(generator: Any, prompts: Any, responses: Any, temperature: float) -> list[Any]:
        rows = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
        given = torch.log_softmax(torch.from_numpy(np.array(generator.forward_batch(rows))) / temperature, -1).numpy()
        scored = []
        for row, prompt, response in zip(given, prompts, responses, strict=True):
            places = np.arange(len(prompt) - 1, len(prompt) + len(response) - 1)
            scored.append(row[places, response])
        return scored

    def _check(self, prompt: list[int], max_tokens: int) -> None:
        context = self.capabilities.context
        if not prompt:
            raise af.EngineError("an empty prompt")
        if context is not None and len(prompt) + max_tokens > context:
            raise af.EngineError(f"a prompt of {len(prompt)} tokens and {max_tokens} more need more than {context}")
        if not 0 <= min(prompt) <= max(prompt) < self._config.vocab_size:
            raise af.EngineError(f"the prompt has tokens outside of the vocabulary of {self._config.vocab_size}")

    # ---- new weights

    async def load_weights(self, update: af.WeightUpdate) -> set[str]:
        self._generator = await asyncio.to_thread(self._take, update)
        return set(update.tensors)

    def _take(self, update: af.WeightUpdate) -> Any:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(self._config, **self._trust)
        tied = set(getattr(model, "all_tied_weights_keys", None) or ())
        try:
            found = model.load_state_dict(dict(update), strict=False, assign=True)
        except RuntimeError as error:  # shapes
            raise af.WeightMismatch(f"version {update.version}: {error}") from error
        odd = [*found.unexpected_keys, *(set(found.missing_keys) - tied)]
        if odd:
            raise af.WeightMismatch(
                f"version {update.version}: tensors too many, or missing: {', '.join(sorted(odd))}"
            )
        model.tie_weights()
        return self._convert(model)

    def _convert(self, model: Any) -> Any:
        with tempfile.TemporaryDirectory(prefix="asyncflow-ct2-", dir=SHM if SHM.is_dir() else None) as folder:
            _InMemory(self._folder, model, self._trust).convert(folder, force=True)
            return ctranslate2.Generator(folder, **self._options)


SHM = Path("/dev/shm")


class _InMemory(TransformersConverter):  # type: ignore[misc]
    """Converts a loaded model. Tokens are named by their numbers, so nothing is tokenized."""

    def __init__(self, folder: str, model: Any, trust: dict[str, bool]) -> None:
        super().__init__(folder, **trust)
        self._model = model

    def load_model(self, *_: Any, **__: Any) -> Any:
        return self._model

    def load_tokenizer(self, *_: Any, **__: Any) -> Any:
        return _Numbers(self._model.config.vocab_size)


class _Numbers:
    bos_token = eos_token = unk_token = "0"

    def __init__(self, count: int) -> None:
        self._count = count

    def get_vocab(self) -> dict[str, int]:
        return {str(number): number for number in range(self._count)}


__all__ = ["CTranslate2Engine"]
