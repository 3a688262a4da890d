"""The plugin registered with the SDK."""

import asyncflow_sdk as af
from asyncflow_torch.plugin import TRAINS


@af.hookimpl
def asyncflow_adapters() -> list[af.AdapterSpec]:
    return [
        af.AdapterSpec(
            kind="train",
            name="accelerate",
            factory="asyncflow_accelerate.engine:AccelerateEngine",
            requires=["accelerate>=1.0", "transformers>=5", "torch>=2.6"],
            install="pip install asyncflow-accelerate",
            can={"ranks": "one", **TRAINS, "dtype": ["option", "bfloat16", "float32"]},
            tested="accelerate 1.15 on a CPU, one process",
        )
    ]
