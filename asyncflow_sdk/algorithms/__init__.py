"""The algorithms that come with the SDK, and how one is found by its name, its class or its import path."""

from .grpo import GRPO, group_advantages
from .making import AlgorithmSpec, algorithm_spec, make_algorithm

__all__ = ["GRPO", "AlgorithmSpec", "algorithm_spec", "group_advantages", "make_algorithm"]
