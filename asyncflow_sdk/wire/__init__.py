"""Sockets, sessions and framing. The only room that speaks ZeroMQ."""

from .client import Client
from .envelope import MAX_BYTES
from .exchange import Reply
from .keys import KeyPair, RunKey, ServerKeys, fresh_keys, server_keys
from .known_keys import await_key, offer_key
from .processes import has_ended, process_key, same_host
from .server import Handler, Server
from .sockets import RETRY_S, on_loopback, probe
from .transfers import MemorySink, PayloadSink

__all__ = [
    "MAX_BYTES",
    "RETRY_S",
    "Client",
    "Handler",
    "KeyPair",
    "MemorySink",
    "PayloadSink",
    "Reply",
    "RunKey",
    "Server",
    "ServerKeys",
    "await_key",
    "fresh_keys",
    "has_ended",
    "offer_key",
    "on_loopback",
    "probe",
    "process_key",
    "same_host",
    "server_keys",
]
