"""The transports that come with the SDK."""

from ..plugins import AdapterSpec, hookimpl


@hookimpl
def asyncflow_adapters() -> list[AdapterSpec]:
    return [
        AdapterSpec(
            kind="transport", name="shm", factory="asyncflow_sdk.weights.shm:ShmTransport", tested="Linux 6.18"
        )
    ]
