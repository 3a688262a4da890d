"""One adapter of a kind, one with a field, one that can do what this SDK does not know; and one that it knows."""

import asyncflow_sdk as af


@af.hookimpl
def asyncflow_adapters(sdk):
    return [
        af.AdapterSpec(kind="scheduler", name="a-kind", factory="asyncflow_future.fields:A"),
        af.AdapterSpec(kind="tracker", name="a-field", factory="asyncflow_future.fields:A", priority=3),
        af.AdapterSpec(kind="launcher", name="can", factory="asyncflow_future.fields:A", can={"teleport": "yes"}),
        af.AdapterSpec(kind="tracker", name=f"known-to-{sdk}", factory="asyncflow_future.fields:A"),
    ]
