"""The SDK's algorithms, the terms of their losses, and the lookup of an algorithm by name, class or import path."""

from .advantages import Moments, dynamic_sampling, gae, group_advantages, standardise
from .factory import AlgorithmSpec, algorithm_spec, make_algorithm
from .parts import KL, Critic, OffPolicy, Overlong
from .policy_gradient import CISPO, DAPO, GRPO, GSPO, PPO, DrGRPO, PolicyGradient
from .terms import clamp_log_ratio, clip, row_mean, sequence_ratio, token_mean, token_ratio, truncate

__all__ = [
    "CISPO", "DAPO", "GRPO", "GSPO", "KL", "PPO", "AlgorithmSpec", "Critic", "DrGRPO", "Moments", "OffPolicy", "Overlong",
    "PolicyGradient", "algorithm_spec", "clamp_log_ratio", "clip", "dynamic_sampling", "gae", "group_advantages", "make_algorithm",
    "row_mean", "sequence_ratio", "standardise", "token_mean", "token_ratio", "truncate",
]  # fmt: skip
