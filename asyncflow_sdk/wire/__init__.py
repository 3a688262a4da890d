"""Sockets, sessions and message framing. The only package that imports zmq."""

from .client import Client
from .envelope import MAX_BYTES
from .exchange import WireReply
from .handler import Handler
from .key_offers import await_key, find_key, offer_key
from .keys import KeyPair, RunKey, ServerKeys, ensure_keys, generate_keys, own_key, rotated, save_keys
from .own_address import LOOPBACK, own_address
from .processes import boot_id, has_ended, process_key, same_host
from .server import Server
from .service import Frames, Member, Service, ServiceAddress, ServiceClient
from .sockets import RETRY_S, is_loopback, probe, transport_of
from .uploads import MemorySink, PayloadSink

__all__ = [
    "LOOPBACK",
    "MAX_BYTES",
    "RETRY_S",
    "Client",
    "Frames",
    "Handler",
    "KeyPair",
    "Member",
    "MemorySink",
    "PayloadSink",
    "RunKey",
    "Server",
    "ServerKeys",
    "Service",
    "ServiceAddress",
    "ServiceClient",
    "WireReply",
    "await_key",
    "boot_id",
    "ensure_keys",
    "find_key",
    "generate_keys",
    "has_ended",
    "is_loopback",
    "offer_key",
    "own_address",
    "own_key",
    "probe",
    "process_key",
    "rotated",
    "same_host",
    "save_keys",
    "transport_of",
]
