"""Sockets, sessions and message framing. The only package that imports zmq."""

from .client import Client
from .envelope import MAX_BYTES
from .exchange import WireReply
from .handler import Handler
from .key_offers import await_key, offer_key
from .keys import KeyPair, RunKey, ServerKeys, ensure_keys, generate_keys
from .processes import has_ended, process_key, same_host
from .server import Server
from .sockets import RETRY_S, is_loopback, probe
from .transfers import MemorySink, PayloadSink

__all__ = [
    "MAX_BYTES",
    "RETRY_S",
    "Client",
    "Handler",
    "KeyPair",
    "MemorySink",
    "PayloadSink",
    "RunKey",
    "Server",
    "ServerKeys",
    "WireReply",
    "await_key",
    "ensure_keys",
    "generate_keys",
    "has_ended",
    "is_loopback",
    "offer_key",
    "probe",
    "process_key",
    "same_host",
]
