"""All exceptions of the SDK, in one tree.

AsyncFlowError
├── ConfigError            the configuration is invalid; raised before anything starts
├── PluginError            a plugin is missing, broken, duplicated or lacks its engine
├── SchemaError            a column, task or row does not match its declaration
│   └── WriteOnceError     a column of a row was written a second time
├── LeaseLost              the lease is no longer valid; the call had no effect
├── Ended                  the stream is over: no further row will arrive
├── VersionNeeded          the replica must load a newer version before it gets more rows
├── DeadlineExceeded       a wait timed out; names the missing thing (also a TimeoutError)
├── MemoryFull             shared memory or disk has no room for the data
├── PayloadLost            the memory or file with the data of a call was removed
├── StoreUnavailable       the host with the data of rows cannot be reached now; nothing is lost
├── WireError              a connection failed
│   ├── AccessDenied       the keys of client and server do not match
│   ├── ProtocolError      the peer sent an unreadable message or has another version
│   └── ServerLost         the server stopped answering
├── WeightError            a version of the weights cannot be used
│   ├── WeightMismatch     names, shapes or dtypes differ from the manifest; lists them
│   ├── DigestMismatch     bytes differ from the published bytes
│   └── VersionGone        the version is no longer kept
├── EngineError            an engine refused or failed a request
│   ├── EngineGone         an engine died and answers no more requests; its worker ends
│   └── StepAborted        another rank aborted the step that this rank was training in parts
├── WorkerFailed           a worker ended for good; carries its name and traceback
└── Interrupted            the run was stopped by request

Other modules have subclasses for their own use. Their docstrings begin with "Internal:".
"""

from __future__ import annotations


class AsyncFlowError(Exception):
    """Root of all errors of the SDK."""


class ConfigError(AsyncFlowError, ValueError):
    """Raised when a configuration is invalid. Nothing was started."""


class PluginError(AsyncFlowError):
    """Raised when a plugin is missing, broken, duplicated, or its engine is not installed."""


class SchemaError(AsyncFlowError, ValueError):
    """Raised when a column, task or row does not match its declaration. Nothing was stored."""


class WriteOnceError(SchemaError):
    """Raised when a column of a row would be written a second time. Nothing was stored."""


class LeaseLost(AsyncFlowError):
    """Raised when a lease expired, was returned or was revoked. The call had no effect."""


class Ended(AsyncFlowError):
    """Raised when a task will never get another row."""


class VersionNeeded(AsyncFlowError):
    """Raised when the staleness policy gives a replica no rows before it loads a newer version."""


class DeadlineExceeded(AsyncFlowError, TimeoutError):
    """Raised when a wait timed out. The message names the missing thing, its provider, and the waiting time."""


class MemoryFull(AsyncFlowError, MemoryError):
    """Raised when there is no room for the data. Nothing was stored."""


class PayloadLost(AsyncFlowError):
    """Raised when the shared memory or file with the data of a call was removed. Nothing was stored; repeat the call."""


class StoreUnavailable(AsyncFlowError):
    """Raised when the store with the data of rows cannot be reached now. The rows are not lost: give them back, and
    lease them again later."""


class WireError(AsyncFlowError, ConnectionError):
    """Raised when a connection to a server failed."""


class AccessDenied(WireError):
    """Raised when the keys of client and server do not match. Nothing was sent."""


class ProtocolError(WireError):
    """Raised when a peer sent an unreadable message or has another version."""


class ServerLost(WireError):
    """Raised when the server does not answer."""


class WeightError(AsyncFlowError):
    """Raised when a version of the weights cannot be used. The replica keeps its version."""


class WeightMismatch(WeightError):
    """Raised when names, shapes or dtypes differ from the manifest; the message lists them."""


class DigestMismatch(WeightError):
    """Raised when bytes differ from the published bytes."""


class VersionGone(WeightError):
    """Raised when a version is no longer kept. Request the newest instead."""


class EngineError(AsyncFlowError):
    """Raised when an engine refused or failed a request."""


class EngineGone(EngineError):
    """Raised when an engine, or a process required by it, has died and answers no more requests."""


class StepAborted(EngineError):
    """Raised when another rank aborted the step. The step is discarded; the engine can begin it again."""


class WorkerFailed(AsyncFlowError):
    """Raised when a worker ended for good. The first line of its message has the cause.

    ``worker``: its name. ``detail``: the cause, and its traceback or the last lines of its output.
    """

    def __init__(self, message: str, worker: str = "", detail: str = "") -> None:
        cause, _, more = detail.partition("\n")
        super().__init__("\n".join(filter(None, ("; ".join(filter(None, (cause, message))), more))))
        self.worker = worker
        self.detail = detail


class Interrupted(AsyncFlowError):
    """Raised when a run was stopped by request. Its results so far are in its run directory."""

    repeated = False
    """True if the stop was requested more than once. Skip everything slow then, such as a report."""


def error_from_name(name: str, message: str) -> AsyncFlowError:
    """Rebuild a peer's error from its class name; an unknown name gives the root class."""
    pending: list[type[AsyncFlowError]] = [AsyncFlowError]
    while pending:
        cls = pending.pop()
        if cls.__name__ == name:
            return cls(message)
        pending.extend(cls.__subclasses__())
    return AsyncFlowError(f"{name}: {message}")
