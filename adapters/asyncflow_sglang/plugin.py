"""What this package registers. It imports no SGLang: factories are strings."""

from __future__ import annotations

from asyncflow_sdk.plugins import AdapterSpec, hookimpl

CAN = {"swap": ["drain", "partial", "in_flight"], "has": ["token_versions", "logprobs"]}


@hookimpl
def asyncflow_adapters() -> list[AdapterSpec]:
    """The rollout engines over an SGLang server, and over SGLang in the worker's process."""
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
