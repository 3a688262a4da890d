"""One body for every transport that is installed, and wrong ones that it must find."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from wrong_transports import WRONG, WrongTransport

from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.interfaces import Host, WeightTransport
from asyncflow_sdk.plugins import registry
from asyncflow_sdk.testing import MemoryTransport, check_transport, ends
from asyncflow_sdk.testing.transports import TRANSPORT_CHECKS
from asyncflow_sdk.weights import transport_named

NAMES = [adapter.spec.name for adapter in registry().adapters if adapter.spec.kind == "transport"]
NEEDS_CUDA = ("cuda-ipc",)


def ends_of(name: str, folder: Path) -> tuple[Callable[[], WeightTransport], Callable[[], WeightTransport]]:
    options: dict[str, Any] = {"path": folder / "weights"} if name == "file" else {}
    return partial(transport_named, name, **options), partial(transport_named, name)


@pytest.mark.parametrize("check", TRANSPORT_CHECKS)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in NEEDS_CUDA])
def test_every_transport_keeps_the_contract(name: str, check: str, tmp_path: Path) -> None:
    check_transport(*ends_of(name, tmp_path), only=[check])


def test_what_is_installed_is_what_the_documents_name() -> None:
    assert {"shm", "file", "tcp", "dist", "cuda-ipc"} >= set(NAMES) >= {"shm", "file", "tcp"}


@pytest.mark.parametrize("name", [name for name in NAMES if name in NEEDS_CUDA])
def test_without_cuda_a_transport_of_gpus_names_another(name: str, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(("check", "fault"), [(check, fault) for check in WRONG for fault in WRONG[check]])
def test_a_wrong_transport_is_found(check: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ends, "LIMIT_S", 2.0)
    with pytest.raises(AssertionError, match=f"^check '{check}': "):
        check_transport(lambda: WrongTransport(fault), lambda: WrongTransport(fault), only=[check])


def test_each_check_finds_a_wrong_transport() -> None:
    assert WRONG.keys() == TRANSPORT_CHECKS.keys()


def test_a_check_that_is_not_there_is_refused() -> None:
    with pytest.raises(AssertionError, match="no check of transports is named nonsense"):
        check_transport(MemoryTransport, MemoryTransport, only=["nonsense"])
