"""DeepSpeedEngine: trains a Hugging Face model by DeepSpeed's ZeRO over N processes.

engine = DeepSpeedEngine("models/mine", stage=3, lr=1e-5)   # in each process, under torchrun, deepspeed or the SDK's own launcher
result = engine.train_step(batch)                           # each rank with its rows; metrics are of the whole step
publisher.publish(version, engine.named_weights())          # each rank its share
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from asyncflow_sdk.algorithms import GRPO
from asyncflow_sdk.interfaces import Algorithm, WeightUpdate
from asyncflow_sdk.types import check_above
from asyncflow_torch.critic import ValueModel
from asyncflow_torch.data_parallel import DataParallelEngine
from asyncflow_torch.devices import local_device
from asyncflow_torch.policy import context_of, load_policy
from asyncflow_torch.ranks import Ranks
from asyncflow_torch.recomputing import compute_again
from asyncflow_torch.schedules import go_to, make_schedule, steps_made
from asyncflow_torch.shares import VALUES

from . import checkpoint, starting
from .config import make_config
from .loading import in_parts, stored_dtype
from .places import shape_of
from .trained import DeepSpeedCritic, Trained
from .weights import published


class DeepSpeedEngine(DataParallelEngine):
    """``stage``: of ZeRO. From 1 on the optimizer lies in parts over the ranks, from 2 on gradients too, at 3 the weights as well, which
    are then gathered a layer at a time, for its pass; never all of them. What the optimizer steps on is float32; what is computed
    with and published is in ``dtype``, float32 or bfloat16, by default the checkpoint's. Gradients are summed over ranks in float32.

    Ranks: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them; without them there is one. ``device``: "auto" is "cuda"
    (NCCL, the GPU of LOCAL_RANK) where there is one, else "cpu" (gloo). ``collective_timeout_s``: how long a rank waits for
    the others within a call before they are said to be gone. ``bucket_bytes``: the most that a rank holds beyond its part while it saves, loads
    or exports weights. ``offload``: the optimizer's part lies in host memory, and steps there. ``config``: more of
    DeepSpeed's configuration. All other options are those of FsdpEngine and TorchEngine. A critic is a second model under the same
    stage and configuration.
    """

    def __init__(
        self,
        model: str,
        *,
        algorithm: Algorithm | None = None,
        stage: int = 3,
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
        checkpointing: bool = False,
        attention: str | None = None,
        packed: bool | None = None,
        config: Mapping[str, Any] | None = None,
        bucket_bytes: int = 64 << 20,
        collective_timeout_s: float = 600.0,
        threads: int | None = None,
        seed: int = 0,
    ) -> None:
        check_above(
            0,
            lr=lr, max_grad_norm=max_grad_norm, temperature=temperature, micro_batch_tokens=micro_batch_tokens, updates=updates,
            critic_lr=critic_lr, bucket_bytes=bucket_bytes, collective_timeout_s=collective_timeout_s, threads=threads,
        )  # fmt: skip
        if threads is not None:
            torch.set_num_threads(threads)
        torch.manual_seed(seed)
        self._source, self.bucket_bytes = model, bucket_bytes
        dtype = stored_dtype(model) if dtype == "auto" else dtype
        settings = make_config(
            stage=stage, dtype=dtype, max_grad_norm=max_grad_norm, offload_optimizer=offload, given=config
        )
        deepspeed, kind = starting.start(device)
        algorithm = algorithm or GRPO()
        self._policy: Trained | None = None
        self._values: DeepSpeedCritic | None = None
        ranks = Ranks.join(local_device(kind), timeout_s=collective_timeout_s)
        try:
            with ranks.calling("make"):
                plain = self._load(model, ranks, settings, dtype, attention)

                def trained(whole: Any, rate: float) -> Trained:
                    if checkpointing:
                        compute_again(whole)
                    return Trained(deepspeed, whole, settings, lr=rate, betas=betas, weight_decay=weight_decay)

                self._policy = trained(plain, lr)
                self._schedule = make_schedule(
                    self._policy.optimizer, schedule, warmup_steps=warmup_steps, decay_steps=decay_steps
                )
                if VALUES in algorithm.asks:
                    begins = ValueModel(self._load(critic or model, ranks, settings, dtype, attention)).eval()
                    self._values = DeepSpeedCritic(trained(begins, critic_lr or lr), ranks, bucket_bytes=bucket_bytes)
            if packed is None:
                packed = str(plain.config._attn_implementation).startswith("flash_attention")
            super().__init__(
                self._engine, ranks=ranks, algorithm=algorithm,
                vocabulary=shape_of(plain.get_input_embeddings().weight)[0], context=context_of(plain),
                device=self._engine.device, temperature=temperature, micro_batch_tokens=micro_batch_tokens,
                packed=packed, updates=updates, critic=self._values,
            )  # fmt: skip
        except BaseException:
            self._free()
            ranks.close()
            starting.end()
            raise

    @property
    def _engine(self) -> Any:
        """DeepSpeed's, of the policy."""
        assert self._policy is not None, "it was closed"
        return self._policy.engine

    def _trained(self) -> list[Trained]:
        critic = () if self._values is None else (self._values.trained,)
        return [each for each in (self._policy, *critic) if each is not None]

    def _load(self, folder: str, ranks: Ranks, settings: Mapping[str, Any], dtype: str, attention: str | None) -> Any:
        def load() -> Any:
            return load_policy(folder, dtype=dtype, device="cpu", attn_implementation=attention)

        if settings["zero_optimization"]["stage"] < 3:
            return ranks.together(load)
        with in_parts(settings):
            return load()

    def zero_gradients(self) -> None:
        for each in self._trained():
            each.check()

    def backward(self, loss: Any, *, last: bool) -> None:
        assert self._policy is not None
        # DeepSpeed takes the mean over ranks, and losses are parts of one sum
        self._policy.backward(loss * self._ranks.size, last=last)

    def optimizer_step(self) -> dict[str, float]:
        assert self._policy is not None
        rate = self._policy.optimizer.param_groups[0]["lr"]
        norms: dict[str, float] = {}

        def critic_steps() -> bool:
            """Within the policy's step, when that could be made."""
            if self._values is not None and "critic_grad_norm" not in norms:
                norms["critic_grad_norm"] = self._values.trained.step(lambda: True)
            return all(map(math.isfinite, norms.values()))

        norm = self._policy.step(critic_steps)
        if self._values is not None and not norms:  # it could not: then the critic makes none either
            norms["critic_grad_norm"] = self._values.trained.step(lambda: False)
        norms["grad_norm"] = norm
        if all(map(math.isfinite, norms.values())):
            self._schedule.step()
        return norms | {"lr": float(rate)}

    def named_weights(self) -> Iterator[tuple[str, Any]]:
        """This rank's share of the policy, in Hugging Face names and ``dtype``: views. No other rank is asked."""
        return published(self._engine, rank=self._ranks.rank, size=self._ranks.size)

    def save(self, path: Path) -> None:
        """Write weights, optimizer and random state below ``path``, which all ranks see, and a critic's: safetensors and JSON, no
        pickle. Any number of ranks can go on from it, at any stage, and so can an FsdpEngine and a TorchEngine."""
        with self._ranks.calling("save"):
            if self._values is not None:
                self._values.save(path / "critic")
            checkpoint.save(path, self._engine, self._ranks, bucket_bytes=self.bucket_bytes)

    def load(self, path: Path) -> None:
        """Continue from what ``save`` wrote, or one of those did. Learning rate and the like are this engine's, not the saved."""
        with self._ranks.calling("load"):
            if self._values is not None:
                self._values.load(path / "critic")
            checkpoint.load(path, self._engine, self._ranks, bucket_bytes=self.bucket_bytes)
            go_to(self._schedule, steps_made(self._engine.basic_optimizer))

    def load_weights(self, update: WeightUpdate) -> None:
        """Take this rank's part of a version's weights, a tensor at a time. The optimizer, and with it the schedule of its learning
        rate, begins anew. A critic stays as it is: it is not published."""
        with self._ranks.calling("load_weights"):
            checkpoint.take(self._engine, update, self._ranks)
            go_to(self._schedule, 0)

    def export(self, path: Path) -> None:
        """Write the policy as a Hugging Face folder, with the tokenizer it came with; each rank its part, into common files."""
        with self._ranks.calling("export"):
            checkpoint.export(path, self._engine, self._source, self._ranks, bucket_bytes=self.bucket_bytes)

    def close(self) -> None:
        """Leave the other ranks, and free what DeepSpeed holds. Idempotent."""
        self._free()
        super().close()
        starting.end()

    def _free(self) -> None:
        trained = self._trained()
        self._policy, self._values = None, None
        for each in trained:
            each.engine.destroy()
