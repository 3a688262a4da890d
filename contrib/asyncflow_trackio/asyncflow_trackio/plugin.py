"""The plugin registered with the SDK."""

import asyncflow_sdk as af


@af.hookimpl
def asyncflow_adapters() -> list[af.AdapterSpec]:
    return [
        af.AdapterSpec(
            kind="tracker",
            name="trackio",
            factory="asyncflow_trackio.tracker:TrackioTracker",
            requires=["trackio>=0.6"],
            install="pip install asyncflow-trackio",
            tested="trackio, local",
        )
    ]
