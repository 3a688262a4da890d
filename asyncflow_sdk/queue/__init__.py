"""TransferQueue: ledger, shared memory and wire as one queue; the server and its clients."""

from .client import AsyncTransferQueue, Connection, LoopPort, Port, Rows, TransferQueue, open_queue
from .leased import AsyncLeasedBatch, LeasedBatch
from .server import QueueServer

__all__ = [
    "AsyncLeasedBatch",
    "AsyncTransferQueue",
    "Connection",
    "LeasedBatch",
    "LoopPort",
    "Port",
    "QueueServer",
    "Rows",
    "TransferQueue",
    "open_queue",
]
