"""The plugin registered with the SDK."""

import asyncflow_sdk as af


@af.hookimpl
def asyncflow_adapters() -> list[af.AdapterSpec]:
    return [
        af.AdapterSpec(
            kind="tracker",
            name="mlflow",
            factory="asyncflow_mlflow.tracker:MlflowTracker",
            requires=["mlflow>=2.20"],
            install="pip install asyncflow-mlflow",
            tested="mlflow, its own server",
        )
    ]
