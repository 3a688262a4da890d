"""Registration of this package's engine. It imports neither torch nor DeepSpeed: factories are
strings."""

from __future__ import annotations

from asyncflow_sdk.plugins import AdapterSpec, hookimpl
from asyncflow_torch.plugin import TRAINS


@hookimpl
def asyncflow_adapters() -> list[AdapterSpec]:
    """The train engine by DeepSpeed."""
    return [
        AdapterSpec(
            kind="train",
            name="deepspeed",
            factory="asyncflow_deepspeed.engine:DeepSpeedEngine",
            requires=["deepspeed>=0.19.8", "torch>=2.6", "transformers>=5", "accelerate>=1.1"],
            install="pip install 'asyncflow-sdk[deepspeed]'",
            tested=["deepspeed==0.19.8", "torch==2.13.*", "transformers==5.23.*"],
            can={"ranks": ["one", "many"], **TRAINS, "dtype": ["option", "bfloat16", "float32"]},
        )
    ]
