"""The parameters that are moved: bfloat16, in 200 tensors, of the shapes of a Llama with 22 layers."""

from __future__ import annotations

import math
import time

import numpy as np
import torch

LAYERS = 22
STRIDE = 4099  # a prime: samples fall everywhere in a tensor

Parameters = dict[str, torch.Tensor]


def shapes(nbytes: float) -> dict[str, tuple[int, ...]]:
    """200 tensors of about ``nbytes`` of bfloat16 together."""
    h = max(round(math.sqrt(nbytes / 2 / (13 * LAYERS + 25)) / 4) * 4, 8)
    layer = {
        "self_attn.q_proj": (h, h), "self_attn.k_proj": (h // 4, h), "self_attn.v_proj": (h // 4, h),
        "self_attn.o_proj": (h, h), "mlp.gate_proj": (7 * h // 2, h), "mlp.up_proj": (7 * h // 2, h),
        "mlp.down_proj": (h, 7 * h // 2), "input_layernorm": (h,), "post_attention_layernorm": (h,),
    }  # fmt: skip
    named: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (25 * h, h)}
    for number in range(LAYERS):
        named |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return named | {"model.norm.weight": (h,)}


def made(nbytes: float, seed: int) -> Parameters:
    """Values as a new model has them; every page is touched."""
    random = torch.Generator().manual_seed(seed)
    block = (torch.randn(1 << 20, generator=random) * 0.02).to(torch.bfloat16)
    return {name: _filled(shape, block) for name, shape in shapes(nbytes).items()}


def _filled(shape: tuple[int, ...], block: torch.Tensor) -> torch.Tensor:
    count = math.prod(shape)
    return block.repeat(-(-count // len(block)))[:count].clone().reshape(shape)


def change(parameters: Parameters, version: int) -> None:
    """As if trained: elements in every bucket differ from version to version."""
    for number, tensor in enumerate(parameters.values()):
        tensor.view(-1)[(version + number) % 7 :: STRIDE] = float(version % 100 + number / 200)


def sample(parameters: Parameters) -> str:
    """What tells one version from another, a few elements a page: not the whole, which others' digests are for."""
    import hashlib

    found = hashlib.blake2b(digest_size=16)
    for tensor in parameters.values():
        flat = tensor.view(-1)
        for start in (0, 1, 2, 3, 4, 5, 6):
            found.update(np.ascontiguousarray(flat.view(torch.int16).numpy()[start::STRIDE]))
    return found.hexdigest()


class Copy:
    """The measure of everything: a warm memcpy of as many bytes."""

    def __init__(self, parameters: Parameters) -> None:
        nbytes = sum(tensor.nbytes for tensor in parameters.values())
        self._from, self._to = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)

    def seconds(self) -> float:
        began = time.perf_counter()
        np.copyto(self._to, self._from)
        return time.perf_counter() - began
