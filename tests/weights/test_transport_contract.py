"""One body for every transport that is installed, and wrong ones that it must find out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from memory_transport import WRONG, MemoryReceiver, MemorySender, MemoryTransport

from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.interfaces import Host, WeightTransport
from asyncflow_sdk.plugins import registry
from asyncflow_sdk.testing import check_transport, ends
from asyncflow_sdk.testing.transports import TRANSPORT_CHECKS

NAMES = [adapter.spec.name for adapter in registry().adapters if adapter.spec.kind == "transport"]
NEEDS_CUDA = ("cuda-ipc",)


def ends_of(name: str, folder: Path) -> tuple[Callable[[], WeightTransport], Callable[[], WeightTransport]]:
    factory: Any = registry().get("transport", name).load()
    options = {"file": {"path": folder / "weights"}}.get(name, {})
    return lambda: factory(**options), lambda: factory()


@pytest.mark.parametrize("check", TRANSPORT_CHECKS)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in NEEDS_CUDA])
def test_every_transport_keeps_to_the_contract(name: str, check: str, tmp_path: Path) -> None:
    check_transport(*ends_of(name, tmp_path), only=[check])


def test_what_is_installed_is_what_the_documents_name() -> None:
    assert {"shm", "file", "tcp", "dist", "cuda-ipc"} >= set(NAMES) >= {"shm", "file"}


@pytest.mark.parametrize("name", [name for name in NAMES if name in NEEDS_CUDA])
def test_without_cuda_a_transport_of_gpus_says_what_to_use_instead(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        check_transport(*ends_of(name, tmp_path))
        return
    sending, fetching = ends_of(name, tmp_path)
    for end in (lambda h: sending().sender(h), lambda h: fetching().receiver(h)):
        with pytest.raises(ConfigError, match=r"(?i)cuda.*(shm|tcp)"):
            end(Host(directory=tmp_path, name="1-0"))


def test_the_smallest_right_transport_passes() -> None:
    check_transport(MemoryTransport, MemoryTransport)


def wrong(part: type[MemorySender] | type[MemoryReceiver]) -> type[MemoryTransport]:
    which = "sends" if issubclass(part, MemorySender) else "receives"
    return type(part.__name__, (MemoryTransport,), {which: part})


@pytest.mark.parametrize(
    ("check", "part"),
    [pytest.param(check, part, id=f"{check}-{part.__name__}") for check in WRONG for part in WRONG[check]],
)
def test_a_wrong_transport_is_found_out(
    check: str, part: type[MemorySender] | type[MemoryReceiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ends, "LIMIT_S", 1.0)
    transport = wrong(part)
    with pytest.raises(AssertionError, match=f"^check '{check}': "):
        check_transport(transport, transport, only=[check])


def test_each_check_has_a_wrong_transport_that_it_finds_out() -> None:
    assert WRONG.keys() == TRANSPORT_CHECKS.keys()


def test_a_check_that_is_not_there_is_refused() -> None:
    with pytest.raises(AssertionError, match="no check of transports is named nonsense"):
        check_transport(MemoryTransport, MemoryTransport, only=["nonsense"])
