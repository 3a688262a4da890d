"""Registration of this package's engines and transports. It imports no torch: factories are
strings."""

from __future__ import annotations

from asyncflow_sdk.plugins import AdapterSpec, hookimpl

_REQUIRES = ["torch>=2.6", "transformers>=5"]
_INSTALL = "pip install 'asyncflow-sdk[torch]'"
TRAINS = {
    "dtype": ["option", "bfloat16", "float32", "float64"],
    "frozen": "option",
    "steps": ["whole", "parts"],
    "has": "sampling_mask",
}
"""Capabilities of all train engines on torch."""
_TESTED = ["torch==2.13.*", "transformers==5.24.*"]


@hookimpl
def asyncflow_adapters() -> list[AdapterSpec]:
    """Return the transformers rollout engine, the torch train engine, and transports by torch."""
    return [
        AdapterSpec(
            kind="rollout",
            name="transformers",
            factory="asyncflow_torch.rollout:TransformersEngine",
            requires=_REQUIRES,
            install=_INSTALL,
            tested=_TESTED,
            can={
                "swap": ["drain", "partial", "in_flight"],
                "has": ["token_versions", "logprobs", "held_weights", "stop_texts", "sampling_mask"],
                "restrictions": ["top_p", "top_k", "min_p", "repetition_penalty"],
                "dtype": "option",
            },
        ),
        AdapterSpec(
            kind="train",
            name="torch",
            factory="asyncflow_torch.train:TorchEngine",
            requires=_REQUIRES,
            install=_INSTALL,
            tested=_TESTED,
            can={"ranks": "one", **TRAINS},
        ),
        AdapterSpec(
            kind="transport",
            name="dist",
            factory="asyncflow_torch.transports.dist:DistTransport",
            requires=_REQUIRES[:1],
            install=_INSTALL,
            tested="torch 2.13 with gloo, on a CPU; nccl has not been run",
            can={"hosts": "many", "encodings": ["full"], "outlives": []},
        ),
        AdapterSpec(
            kind="transport",
            name="cuda-ipc",
            factory="asyncflow_torch.transports.cuda:CudaTransport",
            requires=_REQUIRES[:1],
            install=_INSTALL,
            tested="no GPU",
            can={"hosts": "one", "encodings": ["full"], "outlives": []},
        ),
    ]
