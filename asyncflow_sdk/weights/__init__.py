"""WeightSync: moves and verifies versions of the weights; the ledger says which is current."""

from .host import host_of
from .loading import Loading, check_swap
from .own_loop import OwnUpdate, OwnUpdates
from .prefetch import Staged
from .proof import check_held, check_names, check_probe
from .publication import Publication
from .publisher import WeightPublisher, transport_named
from .staging import Place, Staging
from .update import Update
from .updates import WeightUpdates

__all__ = [
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
    "check_held",
    "check_names",
    "check_probe",
    "check_swap",
    "host_of",
    "transport_named",
]
