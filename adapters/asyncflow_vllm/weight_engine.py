"""HandedWeightEngine: loads a version in a worker of vLLM, the process that holds the model.

It implements vLLM's ``WeightTransferEngine``. The message describes the place of the weights (`map_handover`):
each worker maps the bytes, and the loaders of its model copy this rank's shard.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from asyncflow_sdk.errors import WeightMismatch
from asyncflow_sdk.types import to_torch

from .handover import map_handover


@dataclass
class NoInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Empty: no connection is set up."""


@dataclass
class HandedUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """``handed``: description of a version by `Handover`."""

    handed: str = ""


class HandedWeightEngine(WeightTransferEngine):  # type: ignore[misc]
    """``taken``: names that this rank loaded of the last version, without tensors of other pipeline stages and
    tensors unknown to the model. ``failure``: why the last load failed, "" if it did not."""

    init_info_cls = NoInitInfo
    update_info_cls = HandedUpdateInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.taken: set[str] = set()
        self.failure = ""
        self._places: dict[str, set[str]] = {}  # parameters that each tensor was loaded into the first time

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        """Do nothing."""

    def start_weight_update(self) -> None:
        """Prepare the layers for new weights."""
        self.taken, self.failure = set(), ""
        self._record(lambda: initialize_layerwise_reload(self.model))

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the described version. The base class's method would need an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: HandedUpdateInfo) -> None:
        """Map the tensors and load them into the model."""
        self._record(
            lambda: self._load([(name, to_torch(array)) for name, array in map_handover(update_info.handed)])
        )

    def finish_weight_update(self) -> None:
        """Finish the layers: quantise, repack."""
        self._record(self._finish)

    def shutdown(self) -> None:
        """Do nothing."""

    def _record(self, step: Callable[[], None]) -> None:
        """Run ``step`` and keep its error as ``failure``. A raised error would reach vLLM from the first failing
        rank, and vLLM would take the answers of other ranks for answers to its next calls."""
        if self.failure:
            return
        try:
            step()
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            traceback.print_exc()
            self._restore_layers()

    def _load(self, tensors: list[tuple[str, Any]]) -> None:
        """Load tensors one by one the first time, to learn which of them the model has a place
        for; later together, which is faster for many small tensors."""
        if self._places.keys() != {name for name, _ in tensors}:
            self._places = {}
            places = {name: self._loaded([(name, tensor)]) for name, tensor in tensors}
            self._refuse_lost(set[str]().union(*places.values()))
            self._places = places
        else:
            loaded, wanted = self._loaded(tensors), set().union(*self._places.values())
            if loaded != wanted:
                raise WeightMismatch(
                    f"parameters {', '.join(sorted(loaded ^ wanted)[:10])} were loaded by one version and not by"
                    " another"
                )
        self.taken = {name for name, places in self._places.items() if places}

    def _refuse_lost(self, loaded: set[str]) -> None:
        """Raise WeightMismatch if the model calls parameters loaded although no loader got them, as GPT-OSS does in
        vLLM 0.32: it copies into them, and a reload replaces them."""
        empty = self._empty()
        owned = ((at, layer) for at, layer in self.model.named_modules() if layer in empty)
        lost = {f"{at}.{name}" for at, layer in owned for name, _ in layer.named_parameters(recurse=False)} & loaded
        if lost:
            raise WeightMismatch(
                f"{type(self.model).__name__} of vLLM copies weights past the loaders of its parameters, so vLLM cannot"
                f" replace them in a running engine: {', '.join(sorted(lost)[:10])}"
            )

    def _finish(self) -> None:
        kept = self._empty()
        finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu():
            self._pack_layers(kept)

    def _loaded(self, tensors: list[tuple[str, Any]]) -> set[str]:
        loaded = self.model.load_weights(iter(tensors))
        if not isinstance(loaded, set):
            raise WeightMismatch(
                f"{type(self.model).__name__} of vLLM does not return the names of the weights it loaded"
            )
        return loaded

    def _restore_layers(self) -> None:
        """After a failed load, restore layers not loaded yet to their old weights, and forget
        the failed version. The model still holds a mixture of versions."""
        for layer in self._loading():
            info = get_layerwise_info(layer)
            info.loaded_weights.clear()
            info.load_numel = 0
        finalize_layerwise_reload(self.model, self.model_config)

    def _loading(self) -> Iterator[Any]:
        return (layer for layer in self.model.modules() if get_layerwise_info(layer).can_load())

    def _empty(self) -> set[Any]:
        """Return the layers without any of their new weights."""
        return {layer for layer in self._loading() if not get_layerwise_info(layer).load_numel}

    def _pack_layers(self, kept: set[Any]) -> None:
        """Pack loaded weights for a CPU, which vLLM does after its first load only: experts, and output
        layers tied to the embedding. ``kept``: layers without new weights."""
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear") and module.weight.numel():
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)
            kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
            if kernel is not None and module not in kept:
                kernel.fused_experts.process_weights_after_loading(module)
