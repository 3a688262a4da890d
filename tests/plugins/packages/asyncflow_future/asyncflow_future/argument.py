"""Wants an argument of the hook that this SDK does not give."""

import asyncflow_sdk as af


@af.hookimpl
def asyncflow_adapters(sdk, cluster):
    return [af.AdapterSpec(kind="tracker", name="clustered", factory="asyncflow_future.argument:T")]
