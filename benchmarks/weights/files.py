"""A safetensors file on tmpfs for each version, renamed when it is whole: mapped and copied, or loaded and copied."""

from __future__ import annotations

import time
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from .contender import Replica, Trainer
from .floor import FolderTrainer, connect
from .model import Parameters


class FileTrainer(FolderTrainer):
    def start(self, parameters: Parameters) -> str:
        self._parameters = parameters
        return super().start(parameters)

    def publish(self, version: int) -> None:
        folder = Path(self._folder.name)
        save_file(self._parameters, folder / "writing")
        (folder / "writing").rename(folder / str(version))
        self._socket.send(b"x")

    def settle(self) -> None:
        for path in Path(self._folder.name).glob("[0-9]*"):
            path.unlink()


class FileReplica(Replica):
    def __init__(self, mapped: bool) -> None:
        self._mapped = mapped

    def start(self, parameters: Parameters, address: str) -> None:
        self._parameters, self._folder = parameters, Path(address)
        self._socket = connect(f"{address}/socket")

    def take(self, version: int) -> float:
        self._socket.recv(1)
        began = time.perf_counter()
        path = self._folder / str(version)
        if self._mapped:
            with safe_open(path, "pt") as file:
                for name, parameter in self._parameters.items():
                    parameter.copy_(file.get_tensor(name))
        else:
            for name, tensor in load_file(path).items():
                self._parameters[name].copy_(tensor)
        return time.perf_counter() - began

    def close(self) -> None:
        self._socket.close()


def trainer(name: str) -> Trainer:
    return FileTrainer()


def replica(name: str) -> Replica:
    return FileReplica(name == "safetensors")
