"""For SGLang on CPUs without CUDA: torchvision from PyPI is built for CUDA and cannot register its operators beside a CPU torch,
so that importing it fails. Nothing of it is called when text is generated; here are the two schemas that its import asks for."""

from __future__ import annotations

import importlib.abc
import sys
from importlib.machinery import ModuleSpec
from typing import Any


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self.library: Any = None

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None  # the import goes on as it would have


sys.meta_path.insert(0, _BeforeTorchvision())
