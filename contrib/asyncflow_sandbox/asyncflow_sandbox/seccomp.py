"""A seccomp filter: refuses what no namespace and no limit of the sandbox covers.

New user namespaces have file systems and privileges of their own. Sockets of other families than AF_UNIX
are buffers of the kernel, and AF_VSOCK reaches the host of a virtual machine. Keys of the kernel may be the
driver's. io_uring makes sockets unseen.
"""

from __future__ import annotations

import functools
import platform
import struct

import asyncflow_sdk as af

_MACHINES = {  # AUDIT_ARCH; clone, unshare; socket; add_key, request_key, keyctl, io_uring_setup
    "x86_64": (0xC000003E, (56, 272), 41, (248, 249, 250, 425)),
    "aarch64": (0xC00000B7, (220, 97), 198, (217, 218, 219, 425)),
}  # fmt: skip
_CLONE3 = 435
_X32 = 0x40000000
_CLONE_NEWUSER, _AF_UNIX = 0x10000000, 1
_LOAD, _EQUAL, _AT_LEAST, _HAS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _EPERM, _ENOSYS = 0x7FFF0000, 0x00050001, 0x00050026


@functools.cache
def compiled() -> bytes:
    """Return the filter for this machine, as ``bwrap --seccomp`` reads it."""
    if platform.machine() not in _MACHINES:
        raise af.ConfigError(f"a sandbox needs a processor of {' or '.join(_MACHINES)}, not {platform.machine()}")
    architecture, makers, socket, refused = _MACHINES[platform.machine()]
    lines: list[tuple[str, int, int, str, str]] = [  # label; code, value; the label to go on at if true, if false
        ("", _LOAD, _ARCHITECTURE, "", ""), ("", _EQUAL, architecture, "", "refuse"),
        ("", _LOAD, _NUMBER, "", ""), ("", _AT_LEAST, _X32, "refuse", ""),
        ("", _EQUAL, _CLONE3, "unknown", ""),  # its flags are out of sight; libraries then call clone
        *(("", _EQUAL, number, "refuse", "") for number in refused),
        *(("", _EQUAL, number, "flags", "") for number in makers),
        ("", _EQUAL, socket, "family", "allow"),
        ("flags", _LOAD, _FIRST_ARGUMENT, "", ""), ("", _HAS, _CLONE_NEWUSER, "refuse", "allow"),
        ("family", _LOAD, _FIRST_ARGUMENT, "", ""), ("", _EQUAL, _AF_UNIX, "allow", "refuse"),
        ("allow", _RETURN, _ALLOW, "", ""), ("refuse", _RETURN, _EPERM, "", ""), ("unknown", _RETURN, _ENOSYS, "", ""),
    ]  # fmt: skip
    places = {label: place for place, (label, *_) in enumerate(lines)}
    return b"".join(
        struct.pack("HBBI", code, *(places[label] - place - 1 if label else 0 for label in (yes, no)), value)
        for place, (_, code, value, yes, no) in enumerate(lines)
    )
