"""WeightSync: moves and verifies versions of the weights; the ledger says which is current."""

from .shm import ShmReceiver, ShmSender
from .sync import WeightPublisher, WeightUpdates, check_names

__all__ = ["ShmReceiver", "ShmSender", "WeightPublisher", "WeightUpdates", "check_names"]
