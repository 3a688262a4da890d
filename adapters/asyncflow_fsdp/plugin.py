"""Registration of this package's engine. It imports no torch: factories are strings."""

from __future__ import annotations

from asyncflow_sdk.plugins import AdapterSpec, hookimpl
from asyncflow_torch.plugin import TRAINS


@hookimpl
def asyncflow_adapters() -> list[AdapterSpec]:
    """The train engine "fsdp"."""
    return [
        AdapterSpec(
            kind="train",
            name="fsdp",
            factory="asyncflow_fsdp.engine:FsdpEngine",
            requires=["torch>=2.6", "transformers>=5", "safetensors>=0.5"],
            install="pip install 'asyncflow-sdk[fsdp]'",
            tested="torch 2.13 with gloo, on a CPU, one and two processes; CUDA and NCCL have not been run",
            can={"ranks": ["one", "many"], **TRAINS},
        )
    ]
