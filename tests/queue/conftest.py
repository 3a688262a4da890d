import pytest
from queue_children import WAITS


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that hears nothing from its server asks again after 0.1 s instead of 5 s."""
    monkeypatch.setattr(WAITS, "RESEND_S", 0.1)
