"""WeightSync: moves and verifies versions of the weights; the ledger says which is current."""

from .host import host_of
from .proof import check_names
from .publisher import Publication, WeightPublisher, transport_named
from .staging import Place, Staging
from .update import Update
from .updates import WeightUpdates

__all__ = [
    "Place",
    "Publication",
    "Staging",
    "Update",
    "WeightPublisher",
    "WeightUpdates",
    "check_names",
    "host_of",
    "transport_named",
]
