"""Every exception the SDK raises, one tree.

AsyncFlowError
├── ConfigError            what was asked for cannot work; raised before anything starts
├── PluginError            a plugin is missing, broken, duplicated or lacks its engine
├── SchemaError            a column, task or row is not what was said of it
│   └── WriteOnceError     a column of a row was written a second time
├── LeaseLost              the rows are no longer yours; nothing of what you sent had an effect
├── Ended                  the stream is over: no further row will come
├── VersionNeeded          a replica gets nothing more before it loads a newer version
├── DeadlineExceeded       a deadline passed; says who is waited for (also a TimeoutError)
├── MemoryFull             shared memory or disk has no room for the data
├── PayloadLost            the memory or file that held the data of a call is gone
├── WireError              the connection
│   ├── AccessDenied       the keys of client and server do not fit each other
│   ├── ProtocolError      the peer sent what this version cannot read, or is another version
│   └── ServerLost         the server stopped answering
├── WeightError            a version of weights
│   ├── WeightMismatch     names, shapes or dtypes differ from the manifest; lists them
│   ├── DigestMismatch     bytes differ from what was published
│   └── VersionGone        the version is no longer kept
├── EngineError            an engine refused or failed a request
│   └── EngineGone         an engine has died and answers nothing any more; its worker ends
├── WorkerFailed           a worker ended for good; carries its name and traceback
└── Interrupted            the run was stopped by request
"""

from __future__ import annotations


class AsyncFlowError(Exception):
    """Root of all errors of the SDK."""


class ConfigError(AsyncFlowError, ValueError):
    """Raised when what was asked for cannot work; nothing was started."""


class PluginError(AsyncFlowError):
    """Raised when a plugin is missing, broken, duplicated, or its engine is not installed."""


class SchemaError(AsyncFlowError, ValueError):
    """Raised when a column, task or row is not what was said of it. Nothing was stored."""


class WriteOnceError(SchemaError):
    """Raised when a column of a row would be written a second time. Nothing was stored."""


class LeaseLost(AsyncFlowError):
    """Raised when a lease expired, was given back or was taken back. The call had no effect."""


class Ended(AsyncFlowError):
    """Raised when a task will never get another row."""


class VersionNeeded(AsyncFlowError):
    """Raised when the staleness rule gives a replica nothing more before it loads a newer version."""


class DeadlineExceeded(AsyncFlowError, TimeoutError):
    """Raised when a deadline passed. The message says who was waited for, and since when."""


class MemoryFull(AsyncFlowError, MemoryError):
    """Raised when there is no room for the data. Nothing was stored."""


class PayloadLost(AsyncFlowError):
    """Raised when the shared memory or file that held the data of a call was removed. Nothing was stored; repeat the call."""


class WireError(AsyncFlowError, ConnectionError):
    """Raised when talking to a server failed."""


class AccessDenied(WireError):
    """Raised when the keys of client and server do not fit each other. Nothing was sent."""


class ProtocolError(WireError):
    """Raised when a peer sent what this version cannot read, or is of another version."""


class ServerLost(WireError):
    """Raised when the server does not answer."""


class WeightError(AsyncFlowError):
    """Raised when a version of weights cannot be used. The replica keeps the version it had."""


class WeightMismatch(WeightError):
    """Raised when names, shapes or dtypes differ from the manifest; the message lists them."""


class DigestMismatch(WeightError):
    """Raised when bytes differ from what was published."""


class VersionGone(WeightError):
    """Raised when a version is no longer kept; ask for the newest."""


class EngineError(AsyncFlowError):
    """Raised when an engine refused or failed a request."""


class EngineGone(EngineError):
    """Raised when an engine, or a process that it needs, has died: no request will be answered any more."""


class WorkerFailed(AsyncFlowError):
    """Raised when a worker ended for good.

    ``worker`` is its name, ``detail`` its traceback or the last lines it wrote.
    """

    def __init__(self, message: str, worker: str = "", detail: str = "") -> None:
        super().__init__(f"{message}\n{detail}" if detail else message)
        self.worker = worker
        self.detail = detail


class Interrupted(AsyncFlowError):
    """Raised when a run was stopped by request. What it had done is in its run directory."""

    again = False
    """True if it was requested more than once: nobody waits for anything more, such as a report."""


def by_name(name: str, message: str) -> AsyncFlowError:
    """The error a peer reported, rebuilt from its class name; unknown names give the root class."""
    pending: list[type[AsyncFlowError]] = [AsyncFlowError]
    while pending:
        cls = pending.pop()
        if cls.__name__ == name:
            return cls(message)
        pending.extend(cls.__subclasses__())
    return AsyncFlowError(f"{name}: {message}")
