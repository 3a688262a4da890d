"""Families of models that people train, each as a tiny model of its real class: two to four layers, hidden size 64,
320 tokens, random weights.

    family("qwen3_moe", Path("models/tiny"))           # a folder as the family publishes it, with a tokenizer
    for name, each in FAMILIES.items(): print(name, each.kind)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from .kit_model import BOS, END, PAD, VOCABULARY, merging_tokenizer
from .policy import element, no_progress_bar

_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256, "initializer_range": 0.2,
    "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": END, "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8}
_MTP = {"mtp.fc.weight": (64, 128), "mtp.norm.weight": (64,)}
_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
_PIXELS = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """``config``: class of transformers. ``options``: its arguments beyond the common sizes. ``kind``: "dense",
    "experts", "hybrid" (layers with a state instead of attention) or "folder" (a multimodal model). ``text``:
    arguments of the text part of a multimodal model; None for a plain one. ``untrained``: shapes of tensors in the
    folder that transformers does not load, as layers for drafts."""

    title: str
    config: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    text: dict[str, Any] | None = None
    untrained: dict[str, tuple[int, ...]] = field(default_factory=dict)


FAMILIES = {
    "llama": Family("Llama", "LlamaConfig", "dense"),
    "qwen3": Family("Qwen3", "Qwen3Config", "dense", {"tie_word_embeddings": True}),
    "phi3": Family("Phi-3", "Phi3Config", "dense"),
    "olmo2": Family("OLMo 2", "Olmo2Config", "dense"),
    "gemma3_text": Family(
        "Gemma 3 text", "Gemma3TextConfig", "dense",
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": True, "query_pre_attn_scalar": 32},
    ),
    "gpt_oss": Family(
        "GPT-OSS", "GptOssConfig", "experts",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "mixtral": Family("Mixtral", "MixtralConfig", "experts", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": Family("Qwen3-MoE", "Qwen3MoeConfig", "experts", _EXPERTS),
    "deepseek_v3": Family(
        "DeepSeek-V3", "DeepseekV3Config", "experts",
        {
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1, "n_group": 2,
            "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16, "v_head_dim": 32, "num_key_value_heads": 2, "head_dim": 16, "topk_method": "noaux_tc",
        },
        untrained={"model.layers.2.eh_proj.weight": (64, 128), "model.layers.2.enorm.weight": (64,)},
    ),
    "glm4_moe": Family(
        "GLM-4.5", "Glm4MoeConfig", "experts",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    "qwen3_next": Family(
        "Qwen3-Next", "Qwen3NextConfig", "hybrid", _EXPERTS | _LINEAR | {"shared_expert_intermediate_size": 32}, untrained=_MTP,
    ),
    "qwen3_5_text": Family("Qwen3.5 text", "Qwen3_5TextConfig", "hybrid", _LINEAR),
    "mamba2": Family(
        "Mamba 2", "Mamba2Config", "hybrid",
        {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "expand": 2, "chunk_size": 8},
    ),
    "mamba": Family("Mamba", "MambaConfig", "hybrid", {"state_size": 16, "expand": 2, "time_step_rank": 4}),
    "bamba": Family("Bamba", "BambaConfig", "hybrid", _MAMBA | {"attn_layer_indices": [1]}),
    "granitemoehybrid": Family(
        "Granite 4", "GraniteMoeHybridConfig", "hybrid",
        _MAMBA | {"layer_types": ["linear_attention", "full_attention"], "shared_intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "falcon_h1": Family("Falcon-H1", "FalconH1Config", "hybrid", _MAMBA | {"mamba_d_ssm": 128}),
    "recurrent_gemma": Family(
        "RecurrentGemma", "RecurrentGemmaConfig", "hybrid",
        {"lru_width": 64, "attention_window_size": 8, "block_types": ["recurrent", "attention"], "tie_word_embeddings": True},
    ),
    "lfm2": Family("LFM2", "Lfm2Config", "hybrid", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "conv_dim": 64, "block_dim": 64, "tie_word_embeddings": True}),
    "gemma3": Family(
        "Gemma 3", "Gemma3Config", "folder", {"vision_config": _PIXELS, "mm_tokens_per_image": 4},
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 32},
    ),
    "mistral3": Family("Mistral 3", "Mistral3Config", "folder", {"vision_config": _PIXELS | {"head_dim": 16, "model_type": "pixtral"}}, {"model_type": "mistral"}),
    "qwen3_5": Family("Qwen3.5", "Qwen3_5Config", "folder", {"vision_config": _VISION}, _LINEAR, _MTP),
    "qwen2_5_vl": Family(
        "Qwen2.5-VL", "Qwen2_5_VLConfig", "folder", {"vision_config": _VISION},
        {"rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6], "rope_type": "default"}},
    ),
}  # fmt: skip
"""By name. The model folders of "folder" have vision weights beside the language model's, under a prefix."""
OF_EACH_KIND = ("gemma3_text", "qwen3_moe", "qwen3_next", "gemma3")
"""A family of each kind."""


def family(name: str, folder: Path, *, dtype: str = "float32", seed: int = 0) -> str:
    """Write the model of a family and its tokenizer; return the path."""
    each = FAMILIES[name]
    sizes = _SIZES | each.options
    if each.text is not None:
        text = _SIZES | each.text
        outer = ("tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id", "initializer_range")
        sizes = {"text_config": text} | {name: _SIZES[name] for name in outer} | each.options
    config = getattr(transformers, each.config)(**sizes)
    kind = transformers.AutoModelForCausalLM if each.text is None else transformers.AutoModelForImageTextToText
    with torch.random.fork_rng(devices=[]), no_progress_bar():
        torch.manual_seed(seed)
        kind.from_config(config).to(element(dtype)).save_pretrained(folder)
        if each.untrained:
            file = Path(folder, "model.safetensors")
            more = {name: torch.randn(shape, dtype=element(dtype)) for name, shape in each.untrained.items()}
            save_file(load_file(file) | more, file, metadata={"format": "pt"})
    merging_tokenizer().save_pretrained(folder)
    return str(folder)
