"""Options of the train engines: names, types, defaults and checks, each once.

    class MyEngine(DataParallelEngine):
        @keywords_of(TrainOptions)
        def __init__(self, options: TrainOptions) -> None: ...

    MyEngine("models/mine", learning_rate=1e-5)               # options.learning_rate == 1e-5

`inspect.signature(MyEngine)` lists the options, and type checkers check them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from asyncflow_sdk.algorithms import GRPO
from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.interfaces import Algorithm
from asyncflow_sdk.types import check_above, check_least
from asyncflow_sdk.types.dtypes import floating_name
from asyncflow_sdk.workflow.model_folder import stored_dtype
from asyncflow_sdk.workflow.serialization import keywords_of as keywords_of

from .folder_map import FolderMap
from .policy import check_loading
from .schedules import warmup_of
from .sharded_files import RANK_BUCKET_BYTES
from .shares import VALUES


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of all train engines. Raises ConfigError for numbers out of range, and for training in float16.

    ``model``: a Hugging Face folder. ``algorithm``: default GRPO. ``learning_rate``, ``betas``,
    ``weight_decay``: of AdamW. ``max_grad_norm``: gradients of the whole model are clipped to this
    norm. ``lr_scheduler_type``: "constant", "linear" or "cosine"; the last two fall to 0 until
    max_steps. ``warmup_steps``, ``warmup_ratio``: the learning rate rises over this number of steps,
    or this share of max_steps. ``max_steps``: optimizer steps of the run; a Workflow gives its own. ``updates``:
    optimizer steps per batch, each on a random part of its rows. ``gradient_checkpointing``: recompute
    activations inside a layer in the backward pass.

    ``dtype``: of forward and backward passes and of published weights; "auto" is the dtype of the
    model folder. float16 is refused. The optimizer steps on float32. ``device``: "auto" is "cuda" (the GPU of
    LOCAL_RANK) if torch can use a GPU, else "cpu". ``temperature``: of the rollouts; log-probs are
    computed at it. ``micro_batch_tokens``: maximum of input tokens per forward pass, padding
    included; None computes a step in one pass.

    ``critic``: model folder for the layers of the critic, if the algorithm needs values; default
    ``model``. ``critic_learning_rate``: its learning rate, default ``learning_rate``. ``threads``: of torch, for the
    whole process; None leaves the number unchanged. ``seed``: of torch's generator. Dropout is off:
    it would add noise to the ratio to the policy of the rollouts.

    ``freeze``: patterns as "*.visual.*" of tensors in the model folder that stay as they are: without gradient and
    optimizer, not published, in exports as in the folder.
    ``frozen``: compute only log-probs, without float32 masters, gradients and optimizer. `Logprobs`
    sets it. ``trust_remote_code``: run the folder's own Python for a model that transformers does not
    have.
    """

    model: str = field(kw_only=False)
    algorithm: Algorithm | None = None
    learning_rate: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    lr_scheduler_type: str = "constant"
    warmup_steps: int = 0
    warmup_ratio: float = 0.0
    max_steps: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    temperature: float = 1.0
    micro_batch_tokens: int | None = None
    updates: int = 1
    gradient_checkpointing: bool = False
    critic: str | None = None
    critic_learning_rate: float | None = None
    threads: int | None = None
    seed: int = 0
    freeze: Sequence[str] = ()
    frozen: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        check_above(
            0, learning_rate=self.learning_rate, max_grad_norm=self.max_grad_norm, temperature=self.temperature,
            micro_batch_tokens=self.micro_batch_tokens, updates=self.updates, critic_learning_rate=self.critic_learning_rate, threads=self.threads,
        )  # fmt: skip
        check_least(0, weight_decay=self.weight_decay)
        if not (len(self.betas) == 2 and all(0 <= each < 1 for each in self.betas)):
            raise ConfigError(f"betas must be two numbers from 0 to below 1, not {self.betas!r}")
        check_loading(self.dtype, self.device)
        warmup_of(
            self.lr_scheduler_type,
            warmup_steps=self.warmup_steps,
            warmup_ratio=self.warmup_ratio,
            max_steps=self.max_steps,
        )
        if isinstance(self.freeze, str):
            raise ConfigError(f"freeze={self.freeze!r} is no list of patterns; say freeze=[{self.freeze!r}]")
        if not self.frozen and self.computed_dtype == "float16":
            whose = f", the dtype of model folder {self.model!r}," if self.dtype == "auto" else ""
            raise ConfigError(
                f"training in float16{whose} loses small gradients: they are below its range; say dtype='bfloat16' or"
                " dtype='float32'"
            )

    @property
    def computed_dtype(self) -> str:
        """``dtype``; for "auto" the model folder's: of its configuration, else of its weights."""
        if self.dtype != "auto":
            return floating_name(self.dtype) or self.dtype
        return stored_dtype(self.model) or "float32"  # without one it is refused where it is loaded

    @property
    def adamw(self) -> dict[str, Any]:
        """Keyword arguments of AdamW except ``learning_rate``."""
        return {"betas": tuple(self.betas), "weight_decay": self.weight_decay, "fused": True}

    @property
    def used_algorithm(self) -> Algorithm:
        """The given algorithm, or the default."""
        return self.algorithm or GRPO()

    @property
    def needs_critic(self) -> bool:
        """True if the algorithm needs values."""
        return VALUES in self.used_algorithm.asks

    def trained_part(self, model: Any) -> FolderMap:
        """Turn off the gradients of ``freeze`` in the model of the folder, and return the map of its other
        weights."""
        found = FolderMap.of(model, self.model, dtype=self.dtype, frozen=self.frozen)
        return found.freeze(model, self.freeze)

    def prepare_torch(self) -> None:
        """Set torch's threads and seed."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        torch.manual_seed(self.seed)


@dataclass(frozen=True, kw_only=True)
class ShardedOptions(TrainOptions):
    """Further options of engines on several ranks. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
    name the rank, as torchrun sets them; without them there is one rank. The backend is NCCL on
    "cuda" and gloo on "cpu".

    ``offload``: keep the optimizer on the CPU. ``attention``: attn_implementation of transformers. ``packed``: pack
    rows without padding, refused for a model that does not keep them apart; None packs if attention
    is FlashAttention and the model keeps them apart. ``bucket_bytes``: maximum of
    memory beyond its shards that a rank uses to publish, save, load or export weights; at least one
    row of a tensor. ``collective_timeout_s``: wait for other ranks in a call before they count as
    dead.
    """

    offload: bool = False
    attention: str | None = None
    packed: bool | None = None
    bucket_bytes: int = RANK_BUCKET_BYTES
    collective_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above(0, bucket_bytes=self.bucket_bytes, collective_timeout_s=self.collective_timeout_s)
        check_loading(self.dtype, self.device, self.attention)
