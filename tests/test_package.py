"""The package as people import it."""

import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator

import asyncflow_sdk as af
from asyncflow_sdk import errors


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


def subclasses(cls: type) -> Iterator[type]:
    for each in cls.__subclasses__():
        yield each
        yield from subclasses(each)


def test_every_error_is_public_or_internal() -> None:
    for module in pkgutil.walk_packages(af.__path__, "asyncflow_sdk."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    raised = {af.AsyncFlowError, *subclasses(af.AsyncFlowError)}
    ours = {cls for cls in raised if cls.__module__.startswith("asyncflow_sdk.")}

    public = {cls for cls in ours if cls.__module__ == errors.__name__}
    assert [cls.__name__ for cls in public if cls.__name__ not in af.__all__] == []
    assert [cls for cls in ours - public if not (cls.__doc__ or "").startswith("Internal: ")] == []
