"""Programs that a model wrote, run by bubblewrap without network and within limits."""

from .sandbox import Sandbox, SandboxResult

__all__ = ["Sandbox", "SandboxResult"]
