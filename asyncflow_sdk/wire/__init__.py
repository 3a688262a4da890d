"""Sockets, sessions and message framing. The only package that imports zmq."""

from .client import Client
from .envelope import MAX_BYTES
from .exchange import WireReply
from .keys import (
    KeyPair,
    RunKey,
    ServerKeys,
    await_key,
    ensure_keys,
    generate_keys,
    offer_key,
    own_key,
    rotated,
    save_keys,
)
from .processes import LOOPBACK, boot_id, has_ended, own_address, process_key, same_host
from .router_sockets import RouterSockets
from .server import Handler, Server
from .service import Frames, Member, Service, ServiceAddress, ServiceClient
from .sockets import RETRY_S, is_loopback, probe, transport_of

__all__ = [
    "LOOPBACK",
    "MAX_BYTES",
    "RETRY_S",
    "Client",
    "Frames",
    "Handler",
    "KeyPair",
    "Member",
    "RouterSockets",
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
