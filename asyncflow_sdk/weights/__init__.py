"""WeightSync: moves and verifies versions of the weights; the ledger decides which is current.

``TransportPublisher`` publishes for a trainer. ``TransportSubscriber`` offers the versions to a user's loop,
``ReplicaSubscriber`` and ``EngineLoader`` load them into an engine. ``transports`` move the bytes.
"""

from ..memory import BufferPool
from .engine_loader import EngineLoader, check_held, check_names, check_probe
from .fetcher import Restoration, StagedVersion, fetch_version, get_restoration, pack_restoration
from .host import AUTO, host_of, make_transport
from .publisher import TransportPublication, TransportPublisher
from .replica import ReplicaSubscriber
from .subscriber import StagedUpdate, TransportSubscriber
from .update import Update

__all__ = [
    "AUTO", "BufferPool", "EngineLoader", "ReplicaSubscriber", "Restoration", "StagedUpdate", "StagedVersion",
    "TransportPublication", "TransportPublisher", "TransportSubscriber", "Update", "check_held", "check_names",
    "check_probe", "fetch_version", "get_restoration", "host_of", "make_transport", "pack_restoration",
]  # fmt: skip
