"""Registration of the built-in transports, samplers, staleness policies, algorithms, launchers and stores."""

from .spec import AdapterSpec, Kind, hookimpl

_FACTORIES: tuple[tuple[Kind, str, dict[str, str]], ...] = (
    ("sampler", "asyncflow_sdk.ledger.samplers", {
        "fifo": "Fifo", "whole_groups": "WholeGroups", "shuffled": "Shuffled", "by_column": "ByColumn",
        "length_bucketed": "LengthBucketed", "token_balanced": "TokenBalanced",
    }),
    ("staleness", "asyncflow_sdk.ledger.staleness", {"wait": "Wait", "drop": "Drop", "count": "Count"}),
    ("algorithm", "asyncflow_sdk.algorithms", {
        "grpo": "GRPO", "dr_grpo": "DrGRPO", "dapo": "DAPO", "gspo": "GSPO", "cispo": "CISPO", "ppo": "PPO",
    }),
)  # fmt: skip
"""Adapters without capabilities: their kind, module, and classes by name."""


@hookimpl
def asyncflow_adapters() -> list[AdapterSpec]:
    """Return the built-in adapters. Factories are strings: nothing else is imported."""
    return [
        AdapterSpec(
            kind="transport",
            name="shm",
            factory="asyncflow_sdk.weights.transports.shm:ShmTransport",
            tested="Linux 6.18",
            can={"hosts": "one", "encodings": ["mapped"], "outlives": "trainer"},
        ),
        AdapterSpec(
            kind="transport",
            name="file",
            factory="asyncflow_sdk.weights.transports.file:FileTransport",
            tested="Linux 6.18",
            can={"hosts": "many", "encodings": ["full"], "outlives": "trainer"},
        ),
        AdapterSpec(
            kind="transport",
            name="tcp",
            factory="asyncflow_sdk.weights.transports.tcp:TcpTransport",
            tested="Linux 6.18",
            can={"hosts": "many", "encodings": ["mapped", "full", "delta"], "outlives": []},
        ),
        *(
            AdapterSpec(kind=kind, name=name, factory=f"{module}:{factory}")
            for kind, module, classes in _FACTORIES
            for name, factory in classes.items()
        ),
        AdapterSpec(
            kind="launcher",
            name="process",
            factory="asyncflow_sdk.workflow.workers.process_launcher:ProcessLauncher",
            can={"hosts": "one"},
            tested="Linux 6.18",
        ),
        AdapterSpec(
            kind="launcher",
            name="thread",
            factory="asyncflow_sdk.workflow.workers.thread_launcher:ThreadLauncher",
            can={"hosts": "one"},
        ),
        AdapterSpec(
            kind="launcher",
            name="ssh",
            factory="asyncflow_sdk.workflow.workers.ssh_launcher:SshLauncher",
            can={"hosts": "many"},
            tested="OpenSSH 9 and 10",
        ),
        AdapterSpec(
            kind="store", name="local", factory="asyncflow_sdk.queue.stores.factory:local_store", can={"hosts": "one"}
        ),
        AdapterSpec(
            kind="store",
            name="hosts",
            factory="asyncflow_sdk.queue.stores.factory:hosts_store",
            can={"hosts": "many"},
        ),
    ]
