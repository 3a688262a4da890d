"""WeightSync: moves and verifies versions of the weights; the ledger says which is current."""

from ..memory import BufferPool
from .handover import Handover, handed_over, read_handed
from .host import host_of
from .loading import Loading
from .negotiating import AUTO, Choice, check_fetching, check_swap, choose_encoding, choose_swap, choose_transport
from .own_loop import StagedUpdate, TransportSubscriber
from .prefetch import Staged
from .proof import check_held, check_names, check_probe
from .publication import TransportPublication
from .publisher import TransportPublisher, transport_named
from .restoration import Restoration, packed_restoration, restoration, restored
from .staging import Place, Staging
from .update import Update
from .updates import WeightUpdates

__all__ = [
    "AUTO",
    "BufferPool",
    "Choice",
    "Handover",
    "Loading",
    "Place",
    "Restoration",
    "Staged",
    "StagedUpdate",
    "Staging",
    "TransportPublication",
    "TransportPublisher",
    "TransportSubscriber",
    "Update",
    "WeightUpdates",
    "check_fetching",
    "check_held",
    "check_names",
    "check_probe",
    "check_swap",
    "choose_encoding",
    "choose_swap",
    "choose_transport",
    "handed_over",
    "host_of",
    "packed_restoration",
    "read_handed",
    "restoration",
    "restored",
    "transport_named",
]
