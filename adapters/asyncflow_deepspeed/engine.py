"""DeepSpeedEngine: trains a Hugging Face model by DeepSpeed's ZeRO over N processes.

engine = DeepSpeedEngine("models/mine", stage=3, learning_rate=1e-5)   # in each process, under torchrun, deepspeed or the SDK's own launcher
result = engine.train_step(batch)                           # each rank with its rows; metrics are of the whole step
publisher.publish(version, engine.named_weights(), untrained=engine.untrained)          # each rank its part
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncflow_sdk.interfaces import WeightUpdate
from asyncflow_torch.collate import no_rows
from asyncflow_torch.critic import ValueModel
from asyncflow_torch.data_parallel import DataParallelEngine
from asyncflow_torch.devices import local_device
from asyncflow_torch.open_step import UNDIVIDED, StepSums
from asyncflow_torch.packed_rows import packs
from asyncflow_torch.policy import context_of, load_policy
from asyncflow_torch.ranks import Ranks
from asyncflow_torch.recomputation import recompute_activations
from asyncflow_torch.train_options import ShardedOptions, keywords_of

from . import checkpoint, runtime
from .config import make_config
from .partitions import masters, published, shape_of
from .zero_model import DeepSpeedCritic, ZeroModel


@dataclass(frozen=True, kw_only=True)
class DeepSpeedOptions(ShardedOptions):
    """``stage``: of ZeRO. From 1 on the optimizer is partitioned over ranks, from 2 on gradients
    too, at 3 weights as well; they are then gathered one layer at a time. ``config``: further
    configuration of DeepSpeed; contradictions to the options are refused. ``dtype``: of computation
    and of published weights, "float32" or "bfloat16"; "auto" is the dtype of the model folder.
    ``offload``: keep the optimizer on the CPU, and step there."""

    stage: int = 3
    config: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.settings()

    def settings(self) -> dict[str, Any]:
        """Return DeepSpeed's configuration. Raises ConfigError."""
        return make_config(
            stage=self.stage, dtype=self.computed_dtype, max_grad_norm=self.max_grad_norm, offload_optimizer=self.offload,
            given=self.config,
        )  # fmt: skip


class DeepSpeedEngine(DataParallelEngine):
    """Train engine under ZeRO. The optimizer steps on float32, gradients are summed over ranks
    in float32. The critic is a second model under the same stage and configuration. Options:
    `DeepSpeedOptions`, `ShardedOptions`, `TrainOptions`."""

    marks_last_pass = True

    check_options = DeepSpeedOptions

    @keywords_of(DeepSpeedOptions)
    def __init__(self, options: DeepSpeedOptions) -> None:
        options.prepare_torch()
        self.bucket_bytes = options.bucket_bytes
        dtype = options.computed_dtype
        settings = options.settings()
        deepspeed, kind = runtime.start(options.device)
        self._policy: ZeroModel | None = None
        self._values: DeepSpeedCritic | None = None
        ranks = Ranks.join(local_device(kind), timeout_s=options.collective_timeout_s)

        def load(folder: str) -> Any:
            def read() -> Any:
                return load_policy(
                    folder,
                    dtype=dtype,
                    device="cpu",
                    attn_implementation=options.attention,
                    trust_remote_code=options.trust_remote_code,
                )

            return ranks.together(read) if options.stage < 3 else runtime.partitioned(read, settings)

        def under_zero(whole: Any, learning_rate: float) -> ZeroModel:
            if options.gradient_checkpointing:
                recompute_activations(whole)
            return ZeroModel(deepspeed, whole, settings, options, learning_rate=learning_rate)

        try:
            with ranks.calling("make"):
                plain = load(options.model)
                self._folder = options.trained_part(plain)
                self.untrained = self._folder.untrained
                self._policy = under_zero(plain, options.learning_rate)
                if options.dtype == "auto" and dtype == "bfloat16" and not options.frozen:
                    self._folder.exact({part.name: part.run for part in masters(self._engine)})
                if options.needs_critic:
                    values = ValueModel(load(options.critic or options.model)).eval()
                    zero = under_zero(values, options.critic_learning_rate or options.learning_rate)
                    self._values = DeepSpeedCritic(zero, ranks, bucket_bytes=options.bucket_bytes)
                vocabulary = shape_of(plain.get_input_embeddings().weight)[0]
                device = self._engine.device
                packed = packs(
                    options, plain, self._engine, self._values, ranks=ranks, vocabulary=vocabulary, device=device
                )
            super().__init__(
                self._engine, options, self._policy.optimizer, ranks=ranks, context=context_of(plain),
                vocabulary=vocabulary, device=device, packed=packed, critic=self._values,
            )  # fmt: skip
        except BaseException:
            self._free()
            ranks.close()
            runtime.reset()
            raise

    @property
    def _engine(self) -> Any:
        """DeepSpeed's engine of the policy."""
        assert self._policy is not None, "it was closed"
        return self._policy.engine

    def _models(self) -> list[ZeroModel]:
        critic = () if self._values is None else (self._values.zero,)
        return [each for each in (self._policy, *critic) if each is not None]

    def zero_gradients(self) -> None:
        """Raise EngineError if a step was interrupted: DeepSpeed cannot clear its gradients."""
        for each in self._models():
            each.check()

    def backward(self, loss: Any, *, last: bool) -> None:
        """Add the gradients of ``loss``. DeepSpeed averages over ranks, so the loss is multiplied by their number."""
        assert self._policy is not None
        self._policy.backward(loss * self._ranks.size, last=last)

    def divide_gradients(self, number: float) -> None:
        """Divide the gradients of policy and critic in their next step."""
        for each in self._models():
            each.divide_gradients(number)

    def discard_gradients(self) -> None:
        """Complete the step without a change of weights: DeepSpeed clears gradients only then."""
        if all(each.can_discard for each in self._models()):
            self._pass(no_rows(device=self._device), None, StepSums(UNDIVIDED), last=True)
            for each in self._models():
                each.step(lambda: False)

    def optimizer_step(self) -> dict[str, float]:
        """Clip the gradients and step. Return their norms before clipping."""
        assert self._policy is not None
        norms: dict[str, float] = {}

        def critic_steps() -> bool:
            """Step the critic within the policy's step."""
            if self._values is not None and "critic_grad_norm" not in norms:
                norms["critic_grad_norm"] = self._values.zero.step(lambda: True)
            return all(map(math.isfinite, norms.values()))

        norm = self._policy.step(critic_steps)
        if self._values is not None and not norms:  # the policy's step was skipped, so the critic's is too
            norms["critic_grad_norm"] = self._values.zero.step(lambda: False)
        return norms | {"grad_norm": norm}

    def named_weights(self) -> Iterator[tuple[str, Any]]:
        """Yield this rank's part of the policy by the folder's names. No communication."""
        return published(
            self._engine, self._folder, rank=self._ranks.rank, size=self._ranks.size, bucket_bytes=self.bucket_bytes
        )

    def save_policy(self, path: Path) -> None:
        """Write weights, optimizer and random state, each rank its part. Loadable at any stage."""
        checkpoint.save(path, self._engine, self._ranks, bucket_bytes=self.bucket_bytes)

    def restore_policy(self, path: Path) -> None:
        """Restore weights, optimizer and random state, each rank its part."""
        checkpoint.load(path, self._engine, self._ranks, bucket_bytes=self.bucket_bytes)

    def replace_weights(self, update: WeightUpdate) -> None:
        """Copy this rank's part of ``update``, one tensor at a time, and reset the optimizer."""
        checkpoint.take(self._engine, self._folder, update, self._ranks)

    def export_folder(self, path: Path) -> None:
        """Write the Hugging Face folder, each rank its part of common files."""
        checkpoint.export(path, self._engine, self._folder, self._ranks, bucket_bytes=self.bucket_bytes)

    def close(self) -> None:
        """Free DeepSpeed's memory and leave the process group. Idempotent."""
        self._free()
        super().close()
        runtime.reset()

    def _free(self) -> None:
        models = self._models()
        self._policy, self._values = None, None
        for each in models:
            each.engine.destroy()
