"""HandedWeights: how a worker of vLLM takes a version, in the process that holds the model.

vLLM's own extension point for weights (``WeightTransferEngine``). What arrives is not the weights but where they lie
(`asyncflow_sdk.weights.map_handover`): each worker maps the bytes, and its model's loaders copy what is this rank's shard.
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
from asyncflow_sdk.weights import map_handover


@dataclass
class Nothing(WeightTransferInitInfo):  # type: ignore[misc]
    """There is nothing to set up."""


@dataclass
class Told(WeightTransferUpdateInfo):  # type: ignore[misc]
    """``told``: what `asyncflow_sdk.weights.Handover` tells of a version."""

    told: str = ""


class HandedWeights(WeightTransferEngine):  # type: ignore[misc]
    """``taken``: the names that the model has taken of the version loaded last; those of a tensor that is another
    pipeline stage's, or that the model has no place for, are not among them. ``failure``: why it was not loaded; "" if it was."""

    init_info_cls = Nothing
    update_info_cls = Told

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.taken: set[str] = set()
        self.failure = ""
        self._places: dict[
            str, set[str]
        ] = {}  # which parameters a tensor goes into, as the model said the first time

    def init_transfer_engine(self, init_info: Nothing) -> None:
        pass

    def start_weight_update(self) -> None:
        self.taken, self.failure = set(), ""
        self._noting(lambda: initialize_layerwise_reload(self.model))

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # Not the base class's, which ends with a call that needs an accelerator.
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Told) -> None:
        self._noting(lambda: self._load([(name, to_torch(array)) for name, array in map_handover(update_info.told)]))

    def finish_weight_update(self) -> None:
        self._noting(self._finish)

    def shutdown(self) -> None:
        pass

    def _noting(self, step: Callable[[], None]) -> None:
        """What goes wrong is kept to be asked for. Raised, it would reach vLLM from the first rank that fails, and the answers of
        the others would be taken for those to its next calls."""
        if self.failure:
            return
        try:
            step()
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            traceback.print_exc()
            self._leave_whole()

    def _load(self, tensors: list[tuple[str, Any]]) -> None:
        """One after another the first time, so that the model says of each whether it has a place for it; later together, which
        takes models of many small tensors less time."""
        if self._places.keys() != {name for name, _ in tensors}:
            self._places = {}
            self._places = {name: self._loaded([(name, tensor)]) for name, tensor in tensors}
        else:
            loaded, wanted = self._loaded(tensors), set().union(*self._places.values())
            if loaded != wanted:
                raise WeightMismatch(
                    f"parameters {', '.join(sorted(loaded ^ wanted)[:10])} were loaded by one version and not by another"
                )
        self.taken = {name for name, places in self._places.items() if places}

    def _finish(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu():
            self._pack_output_layers()

    def _loaded(self, tensors: list[tuple[str, Any]]) -> set[str]:
        loaded = self.model.load_weights(iter(tensors))
        if not isinstance(loaded, set):
            raise WeightMismatch(f"{type(self.model).__name__} of vLLM does not say which weights it has loaded")
        return loaded

    def _leave_whole(self) -> None:
        """After a load that broke off: layers that are not loaded get what they had, none is left without memory, and nothing
        of the broken version is kept for the next. What the model holds is a mixture all the same."""
        for layer in self._loading():
            info = get_layerwise_info(layer)
            info.loaded_weights.clear()
            info.load_numel = 0
        finalize_layerwise_reload(self.model, self.model_config)

    def _loading(self) -> Iterator[Any]:
        return (layer for layer in self.model.modules() if get_layerwise_info(layer).can_load())

    def _pack_output_layers(self) -> None:
        """Linear layers on a CPU compute from a packed copy. That of an output layer whose weight is the embedding's is not made
        anew when the embedding is loaded."""
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear") and module.weight.numel():
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)
