"""The package as people import it."""

import subprocess
import sys

import asyncflow_sdk as af


def test_importing_it_loads_no_torch_no_sockets_and_no_engine() -> None:
    code = (
        "import sys, asyncflow_sdk;"
        "print(*sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'zmq', 'transformers', 'numpy', 'pluggy',"
        " 'vllm', 'sglang', 'deepspeed', 'ray', 'rich', 'typer', 'matplotlib'}))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert loaded == []


def test_the_whole_core_loads_without_torch_or_an_engine() -> None:
    code = (
        "import sys, asyncflow_sdk.workflow, asyncflow_sdk.testing, asyncflow_sdk.cli.app, asyncflow_sdk.plugins as p;"
        "p.registry();"
        "print(*sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'transformers', 'safetensors', 'tokenizers'}))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert loaded == []


def test_every_public_name_loads_and_the_list_is_sorted() -> None:
    assert af.__all__ == sorted(af.__all__)
    assert dir(af) == af.__all__
    for name in af.__all__:
        assert getattr(af, name) is not None
