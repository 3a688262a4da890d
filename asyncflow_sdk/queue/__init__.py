"""TransferQueue: ledger, shared memory and wire as one queue; the server and its clients."""

from .client import AsyncTransferQueue, Rows, TransferQueue, open_queue
from .connection import Connection, LoopPort, Port
from .journal_directory import is_unfinished
from .leased import AsyncLeasedBatch, LeasedBatch
from .loader import StreamDataLoader
from .recovery import Recovered
from .renewing import Renewing
from .server import QueueServer

__all__ = [
    "AsyncLeasedBatch",
    "AsyncTransferQueue",
    "Connection",
    "LeasedBatch",
    "LoopPort",
    "Port",
    "QueueServer",
    "Recovered",
    "Renewing",
    "Rows",
    "StreamDataLoader",
    "TransferQueue",
    "is_unfinished",
    "open_queue",
]
