from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def shared() -> Any:
    """One server for all tests that can share one: it takes half a minute to start."""
    from one_server import server

    return server()
