"""Sockets, sessions and framing. The only room that speaks ZeroMQ."""

from .client import Client
from .processes import process_key
from .server import Handler, Server

__all__ = ["Client", "Handler", "Server", "process_key"]
