"""TransferQueue: ledger, shared memory and wire as one queue; the server and its clients."""

from .client import AsyncTransferQueue, QueueClient, open_queue
from .connection import Connection, LoopPort, Port
from .journal_directory import is_unfinished
from .leased import AsyncLeasedBatch, BlockingBatch
from .loader import StreamDataLoader
from .recovery import Recovered
from .renewing import Renewing
from .server import QueueServer

__all__ = [
    "AsyncLeasedBatch",
    "AsyncTransferQueue",
    "BlockingBatch",
    "Connection",
    "LoopPort",
    "Port",
    "QueueClient",
    "QueueServer",
    "Recovered",
    "Renewing",
    "StreamDataLoader",
    "is_unfinished",
    "open_queue",
]
