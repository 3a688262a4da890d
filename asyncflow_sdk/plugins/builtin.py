"""Registration of the built-in transports, samplers, staleness policies, algorithms, launchers and stores."""

from typing import Any

from .spec import AdapterSpec, hookimpl

_ADAPTERS: dict[str, list[tuple[str, str, str, dict[str, Any]]]] = {
    "transport": [
        ("shm", "weights.transports.shm:ShmTransport", "Linux 6.18",
         {"hosts": "one", "encodings": ["mapped"], "outlives": "trainer"}),
        ("file", "weights.transports.file:FileTransport", "Linux 6.18",
         {"hosts": "many", "encodings": ["full"], "outlives": "trainer"}),
        ("tcp", "weights.transports.tcp:TcpTransport", "Linux 6.18",
         {"hosts": "many", "encodings": ["mapped", "full", "delta"], "outlives": []}),
    ],
    "sampler": [
        ("fifo", "ledger.samplers:Fifo", "", {}), ("whole_groups", "ledger.samplers:WholeGroups", "", {}),
        ("shuffled", "ledger.samplers:Shuffled", "", {}), ("by_column", "ledger.samplers:ByColumn", "", {}),
        ("length_bucketed", "ledger.samplers:LengthBucketed", "", {}),
        ("token_balanced", "ledger.samplers:TokenBalanced", "", {}),
    ],
    "staleness": [(name.lower(), f"ledger.staleness:{name}", "", {}) for name in ("Wait", "Drop", "Count")],
    "algorithm": [
        ("grpo", "algorithms:GRPO", "", {}), ("dr_grpo", "algorithms:DrGRPO", "", {}),
        ("dapo", "algorithms:DAPO", "", {}), ("gspo", "algorithms:GSPO", "", {}),
        ("cispo", "algorithms:CISPO", "", {}), ("ppo", "algorithms:PPO", "", {}),
    ],
    "launcher": [
        ("process", "workflow.processes.launchers:ProcessLauncher", "Linux 6.18", {"hosts": "one"}),
        ("thread", "workflow.processes.worker:ThreadLauncher", "", {"hosts": "one"}),
        ("ssh", "workflow.processes.command_launcher:SshLauncher", "OpenSSH 9 and 10", {"hosts": "many"}),
    ],
    "store": [
        ("local", "queue.stores.local:local_store", "", {"hosts": "one"}),
        ("hosts", "queue.stores.hosts:HostsStore", "", {"hosts": "many"}),
    ],
}  # fmt: skip
"""By kind: name, factory, what it was tested with, and capabilities."""


@hookimpl
def asyncflow_adapters() -> list[AdapterSpec]:
    """Return the built-in adapters. Factories are strings: nothing else is imported."""
    return [
        AdapterSpec(kind=kind, name=name, factory=f"asyncflow_sdk.{factory}", tested=tested, can=can)  # type: ignore[arg-type]
        for kind, adapters in _ADAPTERS.items()
        for name, factory, tested, can in adapters
    ]
