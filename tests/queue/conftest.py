from collections.abc import Iterator

import pytest
from queue_children import WAITS, asking_again_soon


@pytest.fixture
def soon() -> Iterator[None]:
    """A client that hears nothing from its server asks again after 0.1 s instead of 5 s."""
    before = WAITS.RESEND_S
    asking_again_soon()
    yield
    WAITS.RESEND_S = before
