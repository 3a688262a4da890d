"""What this package registers. It imports no SGLang: factories are strings."""

from __future__ import annotations

from asyncflow_sdk.plugins import AdapterSpec, hookimpl


@hookimpl
def asyncflow_adapters() -> list[AdapterSpec]:
    """The rollout engine over an SGLang server."""
    return [
        AdapterSpec(
            kind="rollout",
            name="sglang",
            factory="asyncflow_sglang.server:SGLangServer",
            requires=["sglang>=0.5.23", "aiohttp>=3.9"],
            install="pip install 'asyncflow-sdk[sglang]'",
            tested=["sglang==0.5.23"],
            can={"swap": ["drain", "partial", "in_flight"]},
        )
    ]
