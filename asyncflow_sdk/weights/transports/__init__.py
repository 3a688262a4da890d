"""The built-in transports ``shm``, ``file`` and ``tcp``, and parts for transports of other packages.

``VersionMemory`` is the memory of a sender; ``Service`` and ``ServiceClient`` exchange requests between both ends.
"""

from ...wire import Service, ServiceClient
from .shm import VersionMemory

__all__ = ["Service", "ServiceClient", "VersionMemory"]
