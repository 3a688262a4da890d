"""The plugin registered with the SDK."""

import asyncflow_sdk as af


@af.hookimpl
def asyncflow_adapters() -> list[af.AdapterSpec]:
    return [
        af.AdapterSpec(
            kind="tracker",
            name="tensorboard",
            factory="asyncflow_tensorboard.tracker:TensorBoardTracker",
            requires=["tensorboardX>=2.6"],
            install="pip install asyncflow-tensorboard",
            tested="tensorboardX 2.6.5, read by tensorboard 2.21",
        )
    ]
