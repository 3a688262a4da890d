"""The plugin registered with the SDK. Imports no Mooncake."""

import asyncflow_sdk as af

_ANY = "mooncake-transfer-engine-non-cuda>=0.3.13 | mooncake-transfer-engine>=0.3.13"


@af.hookimpl
def asyncflow_adapters() -> list[af.AdapterSpec]:
    return [
        af.AdapterSpec(
            kind="store", name="mooncake", factory="asyncflow_mooncake.store:mooncake_store", requires=[_ANY],
            install="pip install asyncflow-mooncake mooncake-transfer-engine-non-cuda",
            tested="mooncake-transfer-engine-non-cuda==0.3.13.post1", can={"hosts": "many"},
        )
    ]  # fmt: skip
