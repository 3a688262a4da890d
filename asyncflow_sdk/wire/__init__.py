"""Sockets, sessions and framing. The only room that speaks ZeroMQ."""

from .channels import Reply
from .client import Client
from .envelope import MAX_BYTES
from .keys import RunKey, ServerKeys, fresh_keys, server_keys
from .processes import has_ended, process_key, same_host
from .server import Handler, Server
from .sockets import on_loopback

__all__ = [
    "MAX_BYTES",
    "Client",
    "Handler",
    "Reply",
    "RunKey",
    "Server",
    "ServerKeys",
    "fresh_keys",
    "has_ended",
    "on_loopback",
    "process_key",
    "same_host",
    "server_keys",
]
