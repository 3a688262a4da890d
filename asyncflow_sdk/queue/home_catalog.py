"""catalog_of: the homes of a run, as its server's ledger keeps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import ConfigError
from ..interfaces.store import HomeCatalog
from ..ledger import commands as cmd


def catalog_of(send: Callable[[cmd.AnyCommand], Any]) -> HomeCatalog:
    """Return the catalog of a run. ``send``: sends a command of a session, and returns the reply.
    Raises ConfigError if the server keeps no homes."""
    raise ConfigError("the server of this run keeps no list of homes: its store is 'local'")
