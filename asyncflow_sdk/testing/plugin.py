"""Registration of the test engines."""

from ..plugins import AdapterSpec, hookimpl


@hookimpl
def asyncflow_adapters() -> list[AdapterSpec]:
    """Return the adapters of this package."""
    return [
        AdapterSpec(kind="rollout", name="echo", factory="asyncflow_sdk.testing.echo:EchoRollout"),
        AdapterSpec(kind="train", name="echo", factory="asyncflow_sdk.testing.echo:EchoTrain", can={"ranks": "one"}),
        AdapterSpec(
            kind="train",
            name="echo-ranks",
            factory="asyncflow_sdk.testing.echo_ranks:EchoRanks",
            can={"ranks": ["one", "many"]},
        ),
        AdapterSpec(
            kind="rollout",
            name="timed",
            factory="asyncflow_sdk.testing.timed:TimedRollout",
            can={"swap": ["drain", "in_flight"]},
        ),
        AdapterSpec(kind="train", name="timed", factory="asyncflow_sdk.testing.timed:TimedTrain", can={"has": []}),
    ]
