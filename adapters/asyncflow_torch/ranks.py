"""Ranks: the processes of one train engine. They communicate in collectives and raise together.

    ranks = Ranks.join("cpu", timeout_s=600)                   # RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; one without them
    with ranks.calling("train_step"):
        share = ranks.together(lambda: checked(batch))         # raises on all ranks, or on none
        counts = ranks.gather(len(share))                      # values of all ranks, in order

Values go as JSON through gloo, on the CPU whatever the device, and tensors as the engine sends
them. A rank that ends, hangs or raises during a call ends the call for all ranks, with its number
and error.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from asyncflow_sdk.errors import ConfigError, EngineError, error_from_name

ROLL_CALL_S = 10.0
"""Wait of ranks for the errors of the others after a failed call."""
_PLACE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SIOCGIFADDR = 0x8915
_T = TypeVar("_T")


class Ranks:
    """Not thread-safe; all ranks call the same methods in the same order. Made by `join` or
    `alone`."""

    def __init__(self, rank: int, size: int, *, group: Any = None, store: Any = None, owned: bool = False) -> None:
        self.rank, self.size = rank, size
        self._group, self._store, self._owned = group, store, owned
        self._agreed: Exception | None = None
        self._broken = ""

    @classmethod
    def alone(cls) -> Ranks:
        """Return one rank without a process group."""
        return cls(0, 1)

    @classmethod
    def join(cls, device: str, *, timeout_s: float) -> Ranks:
        """Join the ranks of the environment, as set by torchrun, in torch's default process group:
        gloo on the CPU, and torch's backend for ``device``. An existing group is used, and left
        open. ``timeout_s``: of each collective.

        Raises ConfigError for an incomplete environment, EngineError if the others do not join in
        time.
        """
        timeout = timedelta(seconds=timeout_s)
        if dist.is_initialized():
            group = dist.new_group(backend="gloo", timeout=timeout)
            return cls(dist.get_rank(), dist.get_world_size(), group=group)
        rank, size = _place()
        store: Any
        hook = sys.excepthook
        try:
            if size == 1:
                store = dist.HashStore()
            else:
                _choose_interface(os.environ["MASTER_ADDR"])
                store, rank, size = next(rendezvous("env://", rank, size, timeout=timeout))
                store = dist.PrefixStore("asyncflow", store)
            dist.init_process_group(_backend(device), store=store, rank=rank, world_size=size, timeout=timeout)
        except (RuntimeError, ValueError) as error:
            where = ":".join(os.environ.get(name, "") for name in _PLACE[2:])
            raise EngineError(
                f"rank {rank} of {size} has not met the others at {where} within {timeout_s:g} s: {_first(error)}"
            ) from error
        finally:
            sys.excepthook = hook  # torch replaces it each time, for the whole process
        return cls(rank, size, store=store, owned=True)

    @property
    def first(self) -> bool:
        """True for rank 0."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order; any JSON. A collective."""
        if self.size == 1:
            return [value]
        said = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(said)]), group=self._group)
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(said)] = said
        received = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(received, padded, group=self._group)
        return [json.loads(bytes(h[: int(n)].numpy())) for h, n in zip(received, lengths, strict=True)]

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gather(None)

    def together(self, look: Callable[[], _T]) -> _T:
        """Return the result of ``look`` if it returns on all ranks. If it raises on one, all raise:
        their own error, or an error of the same kind with that rank's number. A collective."""
        problem, found = None, None
        try:
            found = look()
        except Exception as error:
            problem = error
        said = self.gather(None if problem is None else [type(problem).__name__, str(problem)])
        for rank, words in enumerate(said):
            if words is not None:
                raise self.agreed(problem or error_from_name(words[0], f"rank {rank}: {words[1]}"))
        return found  # type: ignore[return-value]

    def agreed(self, error: Exception) -> Exception:
        """Return an error raised by all ranks at this place: calls can continue after it."""
        self._agreed = error
        return error

    def on_all(self, error: Exception) -> bool:
        """True if all ranks raise ``error`` or an equal one at this place."""
        return self.size == 1 or error is self._agreed

    @contextlib.contextmanager
    def calling(self, call: str) -> Iterator[None]:
        """End the call on all ranks, and the engine, at an error not ``agreed`` upon: EngineError
        with the rank and its error. Not to be nested."""
        if self._broken:
            raise EngineError(f"{call}() is not possible: {self._broken}")
        try:
            yield
        except Exception as error:
            if self.on_all(error):
                raise
            self._broken = self._ended(call, error)
            raise EngineError(self._broken) from error
        finally:
            self._agreed = None

    def close(self) -> None:
        """Leave the process group if it was made here. Idempotent."""
        owned, self._owned = self._owned, False
        if owned and dist.is_initialized():
            dist.destroy_process_group()

    # ---- when a call broke off

    def _ended(self, call: str, error: Exception) -> str:
        """Return the cause of a failed call."""
        lost = _lost(error)
        own = "" if lost else "".join(traceback.format_exception(error))[-4000:]
        said, gone = self._roll_call(own)
        failed = [f"rank {rank} of {self.size} failed in {call}():\n{why}" for rank, why in said.items() if why]
        if failed:
            return "\n".join(failed)
        if gone:
            who = ", ".join(str(rank) for rank in gone)
            return f"rank {who} of {self.size} has ended or hangs; rank {self.rank} waited for it in {call}(): {_first(error)}"
        return f"the ranks are out of step in {call}(), on rank {self.rank}: {_first(error)}"

    def _roll_call(self, own: str) -> tuple[dict[int, str], list[int]]:
        """Return the error of each answering rank, "" for a rank that lost another; and the silent
        ranks."""
        said = {self.rank: own}
        if self._store is None:  # a group of another owner has another store
            return said, []
        try:
            self._store.set(f"ended/{self.rank}", own or "-")
            self._leave()
            self._collect("ended", said)
            self._store.set(f"heard/{self.rank}", "-")
            if self.first:  # the store may be in this process, and others still read
                self._collect("heard", {self.rank: ""}, only=said)
        except RuntimeError:  # the store is gone
            said.setdefault(0, "" if self.rank == 0 else "it held the group's store, which is gone")
        return {rank: why.strip("-") for rank, why in said.items()}, [r for r in range(self.size) if r not in said]

    def _collect(self, what: str, said: dict[int, str], only: Any = None) -> None:
        until = time.monotonic() + ROLL_CALL_S
        for rank in range(self.size) if only is None else sorted(only):
            if rank in said:
                continue
            left = timedelta(seconds=max(0.05, until - time.monotonic()))
            with contextlib.suppress(dist.DistStoreError):  # not in time
                self._store.wait([f"{what}/{rank}"], left)
                said[rank] = self._store.get(f"{what}/{rank}").decode()

    def _leave(self) -> None:
        """Break off the collectives of the others, which would wait until their timeout. With NCCL
        the end of the process does it."""
        if self._owned and dist.get_backend() == "gloo":
            self.close()


def _choose_interface(first: str) -> None:
    """Have gloo listen on the interface of the route to the first rank, unless the user has chosen one.
    It would take the address of this host's name: loopback on many hosts, even if others have ranks."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((first, 1))  # a datagram socket only looks up the route
        own = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if found[20:24] == own:
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _place() -> tuple[int, int]:
    said = [name for name in _PLACE if os.environ.get(name)]
    if not said or int(os.environ.get("WORLD_SIZE") or 1) == 1:
        return 0, 1
    missing = [name for name in _PLACE if name not in said]
    if missing:
        raise ConfigError(
            f"the environment has {', '.join(said)} and not {', '.join(missing)}; a launcher sets all four for"
            " each rank"
        )
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _backend(device: str) -> str:
    kind = torch.device(device).type
    return "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"


def _lost(error: Exception) -> bool:
    """True if a collective failed because of another rank. gloo reports it only in words."""
    words = ("gloo", "Connection closed by peer", "Connection reset by peer", "Timed out waiting", "NCCL")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)


def _first(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
