"""The plugin registered with the SDK. Imports no Ray."""

import asyncflow_sdk as af


@af.hookimpl
def asyncflow_adapters() -> list[af.AdapterSpec]:
    return [
        af.AdapterSpec(
            kind="launcher", name="ray", factory="asyncflow_ray.launcher:RayLauncher", requires=["ray>=2.50"],
            install="pip install asyncflow-ray", tested="Ray 2.60", can={"hosts": "many"},
        ),
        af.AdapterSpec(
            kind="store", name="ray", factory="asyncflow_ray.store:ray_store", requires=["ray>=2.50"],
            install="pip install asyncflow-ray", tested="Ray 2.60", can={"hosts": "many"},
        ),
    ]  # fmt: skip
