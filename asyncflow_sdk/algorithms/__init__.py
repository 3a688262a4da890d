"""The algorithms that come with the SDK, the terms that they are made of, and how one is found by its name, its class or its import path."""

from .advantages import Moments, gae, group_advantages, standardised
from .critic import Critic
from .grpo import GRPO
from .kl import KL
from .making import AlgorithmSpec, algorithm_spec, make_algorithm
from .named import CISPO, DAPO, GSPO, PPO, DrGRPO
from .off_policy import OffPolicy
from .policy_gradient import PolicyGradient
from .rewards import Overlong, dynamic_sampling
from .terms import bounded, clip, row_mean, sequence_ratio, token_mean, token_ratio, truncate

__all__ = [
    "CISPO", "DAPO", "GRPO", "GSPO", "KL", "PPO", "AlgorithmSpec", "Critic", "DrGRPO", "Moments", "OffPolicy", "Overlong",
    "PolicyGradient", "algorithm_spec", "bounded", "clip", "dynamic_sampling", "gae", "group_advantages", "make_algorithm",
    "row_mean", "sequence_ratio", "standardised", "token_mean", "token_ratio", "truncate",
]  # fmt: skip
