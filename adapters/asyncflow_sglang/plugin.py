"""Registration of this package's engines. It imports no SGLang: factories are strings."""

from __future__ import annotations

from asyncflow_sdk.plugins import AdapterSpec, hookimpl

CAN = {
    "swap": ["drain", "partial", "in_flight"],
    "has": ["token_versions", "logprobs", "stop_texts", "sampling_mask"],
}


@hookimpl
def asyncflow_adapters() -> list[AdapterSpec]:
    """Return the rollout engines ``sglang``, over a server, and ``sglang-engine``, in the worker's process."""
    return [
        AdapterSpec(
            kind="rollout",
            name="sglang",
            factory="asyncflow_sglang.server:SGLangServer",
            requires=["sglang>=0.5.23", "aiohttp>=3.9"],
            install="pip install 'asyncflow-sdk[sglang]'",
            tested=["sglang==0.5.23"],
            can=CAN,
        ),
        AdapterSpec(
            kind="rollout",
            name="sglang-engine",
            factory="asyncflow_sglang.engine:SGLangEngine",
            requires=["sglang>=0.5.23", "aiohttp>=3.9"],
            install="pip install 'asyncflow-sdk[sglang]'",
            tested=["sglang==0.5.23"],
            can=CAN,
        ),
    ]
