"""WeightSync: moves and verifies versions of the weights; the ledger decides which is current.

``TransportPublisher`` publishes for a trainer. ``TransportSubscriber`` offers the versions to a user's loop,
``ReplicaSubscriber`` and ``EngineLoader`` load them into an engine. ``transports`` move the bytes.
"""

from ..memory import BufferPool
from .choices import (
    AUTO,
    Choice,
    check_fetching,
    check_swap,
    choose_encoding,
    choose_swap,
    choose_transport,
    make_transport,
)
from .engine_loader import EngineLoader
from .fetcher import StagedVersion
from .handover import Handover, decode_handover, map_handover
from .host import host_of
from .proof import check_held, check_names, check_probe
from .publication import TransportPublication
from .publisher import TransportPublisher
from .replica import ReplicaSubscriber, SubscriberState
from .restoration import Restoration, fetch_version, get_restoration, pack_restoration, report_restored
from .subscriber import StagedUpdate, TransportSubscriber
from .update import Update

__all__ = [
    "AUTO",
    "BufferPool",
    "Choice",
    "EngineLoader",
    "Handover",
    "ReplicaSubscriber",
    "Restoration",
    "StagedUpdate",
    "StagedVersion",
    "SubscriberState",
    "TransportPublication",
    "TransportPublisher",
    "TransportSubscriber",
    "Update",
    "check_fetching",
    "check_held",
    "check_names",
    "check_probe",
    "check_swap",
    "choose_encoding",
    "choose_swap",
    "choose_transport",
    "decode_handover",
    "fetch_version",
    "get_restoration",
    "host_of",
    "make_transport",
    "map_handover",
    "pack_restoration",
    "report_restored",
]
