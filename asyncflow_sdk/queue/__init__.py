"""The transfer queue of a run: QueueServer, and its clients QueueClient, Connection, BlockingBatch."""

from .batches import AsyncLeasedBatch, BlockingBatch
from .client import AsyncTransferQueue, QueueClient, open_queue
from .connection import Connection, LoopPort, Port
from .journal_directory import is_unfinished
from .lease_renewal import LeaseRenewer
from .loader import StreamDataLoader
from .recovery import Recovered
from .server import QueueServer

__all__ = [
    "AsyncLeasedBatch",
    "AsyncTransferQueue",
    "BlockingBatch",
    "Connection",
    "LeaseRenewer",
    "LoopPort",
    "Port",
    "QueueClient",
    "QueueServer",
    "Recovered",
    "StreamDataLoader",
    "is_unfinished",
    "open_queue",
]
