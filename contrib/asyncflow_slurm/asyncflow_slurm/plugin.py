"""The plugin registered with the SDK."""

import asyncflow_sdk as af


@af.hookimpl
def asyncflow_adapters() -> list[af.AdapterSpec]:
    return [
        af.AdapterSpec(
            kind="launcher", name="slurm", factory="asyncflow_slurm.launcher:SlurmLauncher",
            install="pip install asyncflow-slurm", tested="SLURM 22.05", can={"hosts": "many"},
        )
    ]  # fmt: skip
