"""FsdpEngine: trains a Hugging Face model whose weights, gradients and optimizer lie in shards over N processes (FSDP2).

engine = FsdpEngine("models/mine", lr=1e-5)              # in each process, under torchrun or the SDK's own launcher
result = engine.train_step(batch)                        # each rank with its rows; metrics are of the whole step
publisher.publish(version, engine.named_weights())       # each rank its shards
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from asyncflow_sdk.algorithms import GRPO
from asyncflow_sdk.interfaces import Algorithm, WeightUpdate
from asyncflow_sdk.types import check_above
from asyncflow_torch.critic import ValueModel
from asyncflow_torch.data_parallel import DataParallelEngine
from asyncflow_torch.devices import device_of
from asyncflow_torch.policy import context_of, load_policy, named_weights, vocabulary_of
from asyncflow_torch.ranks import Ranks
from asyncflow_torch.schedules import go_to, make_schedule, steps_made
from asyncflow_torch.shares import VALUES

from . import checkpoint
from .shards import published, take
from .trained import FsdpCritic, Trained
from .wrapping import shard


class FsdpEngine(DataParallelEngine):
    """Weights and optimizer are float32; what is computed with and published is in ``dtype``, by default the checkpoint's; gradients
    are summed over ranks in float32. Weights are gathered a layer at a time, for its pass; never all of them.

    Ranks: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them; without them there is one. ``device``: "cpu" (gloo),
    "cuda" (NCCL, the GPU of LOCAL_RANK), or "auto": "cuda" if torch can use a GPU, else "cpu". ``collective_timeout_s``: how long a rank waits for the others within a call before they are said
    to be gone. ``bucket_bytes``: the most that a rank holds beyond its shards while it gives, saves, loads or exports weights; or one row
    of a tensor, where that is larger.

    ``offload``: shards and optimizer stay on the CPU. ``reshard_after_forward``: False keeps gathered layers until their backward pass.
    ``checkpointing``: what is within a layer is computed again for the backward pass, not kept. ``attention``: of transformers, as its
    attn_implementation; ``packed``: rows are packed without padding; None does so where attention is FlashAttention. All other options are
    those of TorchEngine. A critic is in shards as the policy is, with the same options.
    """

    def __init__(
        self,
        model: str,
        *,
        algorithm: Algorithm | None = None,
        lr: float = 1e-6,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        schedule: str = "constant",
        warmup_steps: int = 0,
        decay_steps: int | None = None,
        dtype: str = "auto",
        device: str = "auto",
        temperature: float = 1.0,
        micro_batch_tokens: int | None = None,
        updates: int = 1,
        critic: str | None = None,
        critic_lr: float | None = None,
        offload: bool = False,
        reshard_after_forward: bool = True,
        checkpointing: bool = False,
        attention: str | None = None,
        packed: bool | None = None,
        bucket_bytes: int = 64 << 20,
        collective_timeout_s: float = 600.0,
        threads: int | None = None,
        seed: int = 0,
    ) -> None:
        check_above(
            0,
            lr=lr, max_grad_norm=max_grad_norm, temperature=temperature, micro_batch_tokens=micro_batch_tokens,
            updates=updates, critic_lr=critic_lr, bucket_bytes=bucket_bytes, collective_timeout_s=collective_timeout_s,
            threads=threads,
        )  # fmt: skip
        if threads is not None:
            torch.set_num_threads(threads)
        torch.manual_seed(seed)
        self._source, self.bucket_bytes = model, bucket_bytes
        algorithm = algorithm or GRPO()
        place = device_of(device)
        # On the CPU first: only shards come to the device, and on each rank a layer at a time.
        load = partial(load_policy, dtype=dtype, device="cpu", attn_implementation=attention)
        plain = load(model)
        self._dtypes = {name: tensor.dtype for name, tensor in named_weights(plain)}
        vocabulary, context, compute = vocabulary_of(plain), context_of(plain), plain.dtype
        ranks = Ranks.join(str(place), timeout_s=collective_timeout_s)
        try:
            with ranks.calling("make"):
                mesh = init_device_mesh(place.type, (ranks.size,))

                def trained(whole: Any, rate: float) -> Trained:
                    sharded = shard(
                        whole, mesh, compute=compute, offload=offload, reshard_after_forward=reshard_after_forward,
                        checkpointing=checkpointing,
                    )  # fmt: skip
                    return Trained(
                        sharded, lr=rate, betas=betas, weight_decay=weight_decay, max_grad_norm=max_grad_norm
                    )

                self._policy = trained(plain, lr)
                self._values: FsdpCritic | None = None
                if VALUES in algorithm.asks:
                    begins = ranks.together(lambda: ValueModel(load(critic or model)).eval())
                    self._values = FsdpCritic(trained(begins, critic_lr or lr), ranks, bucket_bytes=bucket_bytes)
                self._schedule = make_schedule(
                    self._policy.optimizer, schedule, warmup_steps=warmup_steps, decay_steps=decay_steps
                )
        except BaseException:
            ranks.close()
            raise
        if packed is None:
            packed = str(plain.config._attn_implementation).startswith("flash_attention")
        super().__init__(
            self._policy.model, ranks=ranks, algorithm=algorithm, vocabulary=vocabulary, context=context, device=place,
            temperature=temperature, micro_batch_tokens=micro_batch_tokens, packed=packed, updates=updates,
            critic=self._values,
        )  # fmt: skip

    def zero_gradients(self) -> None:
        for each in self._trained().values():
            each.optimizer.zero_grad()

    def backward(self, loss: Any, *, last: bool) -> None:
        (loss * self._ranks.size).backward()  # FSDP takes the mean over ranks, and losses are parts of one sum

    def optimizer_step(self) -> dict[str, float]:
        trained = self._trained()
        norms = {name: each.norm() for name, each in trained.items()}
        rate = self._policy.optimizer.param_groups[0]["lr"]
        if not all(map(torch.isfinite, norms.values())):
            self.zero_gradients()
        else:
            for name, each in trained.items():
                each.step(norms[name])
            self._schedule.step()
        return {name: float(norm) for name, norm in norms.items()} | {"lr": float(rate)}

    def _trained(self) -> dict[str, Trained]:
        """By what its norm is called."""
        critic = {} if self._values is None else {"critic_grad_norm": self._values.trained}
        return {"grad_norm": self._policy} | critic

    def named_weights(self) -> Iterator[tuple[str, Any]]:
        """This rank's shards, and on rank 0 what is not sharded, in Hugging Face names and ``dtype``. No other rank is asked."""
        return published(self._model, self._dtypes, rank=self._ranks.rank, bucket_bytes=self.bucket_bytes)

    def save(self, path: Path) -> None:
        """Write weights, optimizer and random state below ``path``, which all ranks see, and a critic's: safetensors and JSON, no
        pickle. Any number of ranks can go on from it, and so can a TorchEngine."""
        with self._ranks.calling("save"):
            if self._values is not None:
                self._values.save(path / "critic")
            checkpoint.save(path, self._model, self._policy.optimizer, self._ranks, bucket_bytes=self.bucket_bytes)

    def load(self, path: Path) -> None:
        """Continue from what ``save`` wrote, or a TorchEngine did. Learning rate and the like are this engine's, not the saved."""
        with self._ranks.calling("load"):
            if self._values is not None:
                self._values.load(path / "critic")
            checkpoint.load(path, self._model, self._policy.optimizer, self._ranks, bucket_bytes=self.bucket_bytes)
            go_to(self._schedule, steps_made(self._policy.optimizer))

    def load_weights(self, update: WeightUpdate) -> None:
        """Take this rank's shards of a version's weights, a tensor at a time. The optimizer, and with it the schedule of its learning
        rate, begins anew. A critic stays as it is: it is not published."""
        with self._ranks.calling("load_weights"):
            tensors = self._ranks.together(lambda: take(self._model, self._dtypes, update, rank=self._ranks.rank))
            self._ranks.together(tensors)
            self._policy.optimizer.state.clear()
            go_to(self._schedule, 0)

    def export(self, path: Path) -> None:
        """Write the policy as a Hugging Face folder, with the tokenizer it came with; each rank its shards, into common files."""
        with self._ranks.calling("export"):
            checkpoint.export(
                path, self._model, self._dtypes, self._source, self._ranks, bucket_bytes=self.bucket_bytes
            )
