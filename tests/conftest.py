import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from children import share_servers, warm_python
from hypothesis import HealthCheck, settings

from asyncflow_sdk.testing.kit.parse_guard import whole_parses

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two test processes with two threads each would only wait
settings.register_profile("any load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any load")
# nohup and a script's & make a process ignore Ctrl-C; the children of the tests would ignore it, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    assert set(LONG) <= {path.name for path in Path(__file__).parent.rglob("test_*.py")}, (
        "a module of LONG has another name"
    )
    if getattr(config.option, "numprocesses", None):  # xdist's workers are started next
        share_servers()


@pytest.fixture(scope="session", autouse=True)
def _whole_parses() -> Iterator[None]:
    """Hypothesis parses the sources of what is tested, while other threads of it import what parses too."""
    with whole_parses():
        yield


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes of the test, started with this interpreter, have imported torch already."""
    monkeypatch.setattr(sys, "executable", warm_python())


STARTS_A_PROCESS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.exec"}
_fast_test = ""


def _refuse(event: str, _: tuple[Any, ...]) -> None:
    """An audit hook, which cannot be removed: while a test marked ``fast`` runs, no process starts."""
    if _fast_test and event in STARTS_A_PROCESS:
        raise AssertionError(f"{_fast_test} is marked fast, and starts a process ({event})")


sys.addaudithook(_refuse)


@pytest.fixture(autouse=True)
def _no_process_in_a_fast_test(request: pytest.FixtureRequest) -> Iterator[None]:
    global _fast_test
    _fast_test = request.node.nodeid if request.node.get_closest_marker("fast") else ""
    yield
    _fast_test = ""


ASKED = {name: os.environ.get(f"ASYNCFLOW_TEST_{name.upper()}", "") for name in ("vllm", "sglang", "deepspeed")}
"""Where an engine must be: "here", or the interpreter that has it, for tests with the fixture ``far``;
"" nowhere. Elsewhere its tests are skipped. ``make test-ENGINE`` makes its environment."""
LIMITS_S = {"vllm": 600, "sglang": 900, "deepspeed": 300, "both": 900}
"""They take up to a minute to start."""
LONG = [
    "test_typed.py", "test_kit_catches.py", "test_guide.py", "test_fsdp.py", "test_attacked_hosts.py", "test_any_order.py",
    "test_documents.py", "test_torch_several_hosts.py", "test_echo_conformance.py", "test_new_plugin.py", "test_demo.py",
    "test_benchmarks.py", "test_wrong_stores.py", "test_torch_dist_transport.py", "test_wrong_trainers.py",
    "test_check_apart.py", "test_hosts_attacked.py", "test_torch_swap_runs.py", "test_ranks.py",
    "test_fsdp_stage.py", "test_machine.py", "test_kit_catches_models.py", "test_fsdp_run.py", "test_survival.py",
    "test_recovery_kills.py", "test_folder_map.py", "test_torch_drift.py", "test_models.py", "test_family_folders.py",
    "test_torch_rollout_families.py", "test_torch_freeze.py", "test_fsdp_packing.py",
]  # fmt: skip
"""Modules of ``make test-long``, the longest first: what is long and comes last has a processor for itself."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import only the modules of the tier: -m long, or -m "not long"."""
    tier = {"long": False, "not long": True}.get(config.option.markexpr)
    module = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if module and tier is (collection_path.name in LONG) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
    here = {name: importlib.util.find_spec(name) is not None for name in ASKED}
    for name, asked in ASKED.items():
        assert here[name] or asked != "here", f"{name} is to be tested, and cannot be imported"
    for item in items:
        if item.path.name in LONG:
            item.add_marker("long")
        if Path(__file__).parent / "engines" in item.path.parents:
            name = item.path.parent.name
            far = name == "both" or "far" in getattr(item, "fixturenames", ())
            needs = ["vllm", "sglang"] if name == "both" else [name]
            item.add_marker(pytest.mark.timeout(LIMITS_S[name]))
            item.add_marker(pytest.mark.filterwarnings("default"))  # those of engines, and of what they need
            if not all(ASKED[each] not in ("", "here") if far else here[each] for each in needs):
                item.add_marker(pytest.mark.skip(reason=f"{name} is not installed here: make test-{name}"))


@pytest.fixture
def far(request: pytest.FixtureRequest) -> str:
    """The interpreter with the engine."""
    return ASKED[request.path.parent.name]


@pytest.fixture
def pythons() -> list[str]:
    """The interpreters with vLLM and with SGLang."""
    return [ASKED["vllm"], ASKED["sglang"]]
