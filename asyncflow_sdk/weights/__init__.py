"""WeightSync: moves and verifies versions of the weights; the ledger says which is current."""

from .handover import Handover, handed_over, read_handed
from .host import host_of
from .loading import Loading
from .negotiating import AUTO, Choice, check_fetching, check_swap, choose_encoding, choose_swap, choose_transport
from .own_loop import OwnUpdate, OwnUpdates
from .prefetch import Staged
from .proof import check_held, check_names, check_probe
from .publication import Publication
from .publisher import WeightPublisher, transport_named
from .staging import Place, Staging
from .update import Update
from .updates import WeightUpdates

__all__ = [
    "AUTO",
    "Choice",
    "Handover",
    "Loading",
    "OwnUpdate",
    "OwnUpdates",
    "Place",
    "Publication",
    "Staged",
    "Staging",
    "Update",
    "WeightPublisher",
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
    "read_handed",
    "transport_named",
]
