"""Ray's object store: one object a version, a dict of arrays, which is its fastest; its memory in place from the start.

bfloat16 travels as uint16, so that arrays are mapped at the other end and not unpickled. Both processes are drivers of
one local cluster; references go through an actor that the replica waits at.
"""

from __future__ import annotations

import asyncio
import os
import time

os.environ |= {"RAY_preallocate_plasma_memory": "1", "RAY_AUTH_MODE": "token"}  # both drivers show one token

import ray
import torch

from .contender import Replica, Trainer
from .model import Parameters

NAMESPACE = "weights"
ROOM = 3.3  # of the object store, in versions


@ray.remote(num_cpus=0)
class Mailbox:
    def __init__(self) -> None:
        self._news: asyncio.Queue[list[ray.ObjectRef]] = asyncio.Queue()

    async def put(self, reference: list[ray.ObjectRef]) -> None:
        self._news.put_nowait(reference)

    async def get(self) -> list[ray.ObjectRef]:
        return await self._news.get()


def _quiet() -> None:
    torch.set_num_threads(1)


class RayTrainer(Trainer):
    def start(self, parameters: Parameters) -> str:
        _quiet()
        nbytes = sum(tensor.nbytes for tensor in parameters.values())
        made = ray.init(
            num_cpus=2, object_store_memory=int(nbytes * ROOM) + (128 << 20), include_dashboard=False,
            log_to_driver=False, logging_level="ERROR", namespace=NAMESPACE,
        )  # fmt: skip
        self._arrays = {name: tensor.view(torch.uint16).numpy() for name, tensor in parameters.items()}
        self._mailbox = Mailbox.options(name="mailbox").remote()  # type: ignore[attr-defined]
        return str(made.address_info["gcs_address"])

    def publish(self, version: int) -> None:
        self._mailbox.put.remote([ray.put(self._arrays)])

    def close(self) -> None:
        ray.shutdown()


class RayReplica(Replica):
    def start(self, parameters: Parameters, address: str) -> None:
        _quiet()
        self._parameters = parameters
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", namespace=NAMESPACE)
        self._mailbox = ray.get_actor("mailbox")

    def take(self, version: int) -> float:
        (reference,) = ray.get(self._mailbox.get.remote())
        began = time.perf_counter()
        for name, array in ray.get(reference).items():
            self._parameters[name].copy_(torch.from_numpy(array).view(torch.bfloat16))
        return time.perf_counter() - began

    def close(self) -> None:
        ray.shutdown()


def trainer(name: str) -> Trainer:
    return RayTrainer()


def replica(name: str) -> Replica:
    return RayReplica()
