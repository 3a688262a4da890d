"""Ascend's TransferQueue 0.1.11: in-memory backend, two storage units, its low-level client, which is its fastest.

``polling_mode`` is on: without it a fetch that finds nothing keeps the controller from everybody for seconds.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")

import ray
import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import TransferQueueClient
from transfer_queue.utils.enum_utils import Role
from transfer_queue.utils.zmq_utils import ZMQServerInfo

from .contender import Client, Service, Task
from .samples import Columns

BACKEND = "SimpleStorage"
EMPTY_S = 0.002  # between two fetches that find nothing


class Peer(Service):
    def start(self, tasks: dict[str, Task]) -> str:
        ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        return set_up({name: list(task.needs) for name, task in tasks.items()})

    def end(self) -> None:
        """It has no end: ``take`` counts."""

    def check(self, put: int) -> None:
        """It keeps no books."""

    def stop(self) -> None:
        transfer_queue.close()
        ray.shutdown()


class PeerClient(Client):
    def __init__(self, address: str) -> None:
        torch.set_num_threads(1)
        info, storage, self._needs = json.loads(address, object_hook=_made)
        self._client = TransferQueueClient(uuid.uuid4().hex, info)
        config = OmegaConf.create(storage, flags={"allow_objects": True})
        self._client.initialize_storage_manager(manager_type=BACKEND, config=config)

    @property
    def _partition(self) -> str:
        return f"part-{self.part}"

    def prepare(self, columns: Columns) -> Any:
        made = {}
        for name, column in columns.items():
            if isinstance(column, tuple):
                values, offsets = map(torch.from_numpy, column)
                made[name] = torch.nested.nested_tensor_from_jagged(values, offsets)
                rows = len(offsets) - 1
            else:
                made[name] = torch.from_numpy(column)
                rows = len(column)
        return TensorDict(made, batch_size=rows)

    def put(self, prepared: Any) -> None:
        self._client.put(data=prepared, partition_id=self._partition)

    def take(self, task: str, count: int, more: Callable[[], bool]) -> Any:
        while more():
            meta = self._client.get_meta(
                data_fields=self._needs[task], batch_size=count, partition_id=self._partition,
                mode="fetch", task_name=task,
            )  # fmt: skip
            if meta.size:
                return meta, self._client.get_data(meta)
            time.sleep(EMPTY_S)
        return None

    def finish(self, taken: Any, prepared: Any = None) -> None:
        if prepared is not None:
            self._client.put(data=prepared, metadata=taken[0])

    def settle(self) -> None:
        """Nothing waits."""

    def values(self, taken: Any) -> list[Any]:
        return [(column.values() if column.is_nested else column).numpy() for column in taken[1].values()]

    def rows(self, taken: Any) -> int:
        return int(taken[0].size)

    def clear(self) -> None:
        self._client.clear_partition(self._partition)

    def close(self) -> None:
        self._client.close()


def set_up(needs: dict[str, list[str]], **backend: Any) -> str:
    """Start it in a Ray that runs. Returns the address for clients."""
    asked = {"controller": {"polling_mode": True}, "backend": {"storage_backend": BACKEND}}
    asked["backend"][BACKEND] = {"num_data_storage_units": 2, **backend}  # type: ignore[assignment]
    made = transfer_queue.init(OmegaConf.create(asked, flags={"allow_objects": True}))
    storage = OmegaConf.to_container(made.backend[BACKEND])
    return json.dumps([made.controller.zmq_info, storage, needs], default=_plain)


def service(name: str) -> Service:
    return Peer()


def client(name: str, address: str) -> Client:
    return PeerClient(address)


def _plain(info: ZMQServerInfo) -> dict[str, Any]:
    """Where one of its servers listens, as JSON."""
    return {**info.to_dict(), "role": info.role.value}


def _made(values: dict[str, Any]) -> Any:
    """The same made of JSON again."""
    if values.keys() != {"role", "id", "ip", "ports"}:
        return values
    return ZMQServerInfo(**{**values, "role": Role(values["role"])})
