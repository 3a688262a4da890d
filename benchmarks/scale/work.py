"""The reward stage: it costs nothing but its requests."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

import asyncflow_sdk as af


def reward(response_ids: af.Ragged) -> npt.NDArray[np.float32]:
    return np.zeros(len(response_ids), np.float32)
