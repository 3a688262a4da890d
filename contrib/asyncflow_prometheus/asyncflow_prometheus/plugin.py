"""The plugin registered with the SDK."""

import asyncflow_sdk as af


@af.hookimpl
def asyncflow_adapters() -> list[af.AdapterSpec]:
    return [
        af.AdapterSpec(
            kind="tracker",
            name="prometheus",
            factory="asyncflow_prometheus.tracker:PrometheusTracker",
            requires=["prometheus_client>=0.20"],
            install="pip install asyncflow-prometheus",
            tested="Prometheus 2.42",
        )
    ]
