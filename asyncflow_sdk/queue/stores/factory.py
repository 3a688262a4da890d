"""The stores "local" and "hosts", and ``make_store``: the store of a connection, by its kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import AsyncFlowError, ConfigError, PluginError
from ...interfaces.store import PayloadStore, StoreContext
from ...plugins import registry
from ...types.config import LOCAL
from .homes import SERVER_MEMORY, segment_prefix
from .hosts import HostsStore
from .local import InlineStore, SharedStore


def local_store(context: StoreContext) -> SharedStore | InlineStore:
    """Return the store of runs with one home, the server's memory: mapped on its host, and reached
    over its socket from others."""
    if context.rows is None:
        return InlineStore(context.check_size)
    return SharedStore(context.rows, segment_prefix(SERVER_MEMORY, context.session), synced=context.synced)


def hosts_store(context: StoreContext, **options: Any) -> PayloadStore:
    """Return the store of runs with a home on each host. ``options``: of ``HostsStore``."""
    return HostsStore(context, **options)


def make_store(name: str, options: Mapping[str, Any], context: StoreContext) -> PayloadStore:
    """Create the store of a connection, from the plugins. Raises PluginError, ConfigError."""
    if name == LOCAL:  # discovering plugins takes longer than connecting
        return local_store(context)
    factory = registry().get("store", name).load()
    try:
        made = factory(context, **options)
    except AsyncFlowError:
        raise
    except Exception as error:
        text = f"store {name!r} cannot be created with {dict(options)}: {type(error).__name__}: {error}"
        raise ConfigError(text) from error
    if not isinstance(made, PayloadStore):
        raise PluginError(f"store {name!r} is a {type(made).__name__}, not a {PayloadStore.__name__}")
    return made
