"""The plugin registered with the SDK."""

import asyncflow_sdk as af


@af.hookimpl
def asyncflow_adapters() -> list[af.AdapterSpec]:
    return [
        af.AdapterSpec(
            kind="tracker",
            name="wandb",
            factory="asyncflow_wandb.tracker:WandbTracker",
            requires=["wandb>=0.19"],
            install="pip install asyncflow-wandb",
            tested="wandb, offline",
        )
    ]
