"""Engines that cannot do everything, as adapters declare them or as only they themselves know."""

import asyncflow_sdk as af
from asyncflow_sdk.testing.echo import EchoRollout


class InFlightOnly(EchoRollout):
    def __init__(self, model=""):
        super().__init__(in_flight=True)
        self.capabilities = af.Capabilities(swap={"in_flight"}, token_versions=True, max_rows=64)


class Mute(EchoRollout):
    """Takes weights in flight, and does not say which version drew what."""

    def __init__(self, model=""):
        super().__init__()
        self.capabilities = af.Capabilities(swap={"in_flight"}, max_rows=64)


class OnlyByFile(EchoRollout):
    def __init__(self, model=""):
        super().__init__()
        self.capabilities = af.Capabilities(max_rows=64, transports={"file", "tcp"})
