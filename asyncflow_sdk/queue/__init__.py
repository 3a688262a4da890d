"""TransferQueue: ledger, shared memory and wire as one queue; the server and its clients."""

from .client import AsyncTransferQueue, QueueClient, open_queue
from .connection import Connection, LoopPort, Port
from .journal_directory import is_unfinished
from .lease_renewal import LeaseRenewer
from .leased import AsyncLeasedBatch, BlockingBatch
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
