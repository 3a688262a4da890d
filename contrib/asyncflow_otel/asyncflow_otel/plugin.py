"""The plugin registered with the SDK."""

import asyncflow_sdk as af


@af.hookimpl
def asyncflow_adapters() -> list[af.AdapterSpec]:
    return [
        af.AdapterSpec(
            kind="tracker",
            name="otel",
            factory="asyncflow_otel.tracker:OtelTracker",
            requires=["opentelemetry-sdk>=1.27", "opentelemetry-exporter-otlp-proto-http>=1.27"],
            install="pip install asyncflow-otel",
            tested="MLflow 3.17 as the receiver",
        )
    ]
