"""WeightSync: moves and verifies versions of the weights; the ledger says which is current."""

from .proof import check_names
from .publisher import WeightPublisher
from .updates import WeightUpdates

__all__ = ["WeightPublisher", "WeightUpdates", "check_names"]
