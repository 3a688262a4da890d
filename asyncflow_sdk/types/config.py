"""What users choose: staleness, sampling, weights, checkpoints. Frozen and keyword-only; checked when made."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ..errors import ConfigError
from .dtypes import check_floating
from .probe import Probe, validate_probe
from .validation import UserConfig, check_fields, check_types

SwapPolicy = Literal["auto", "drain", "boundary", "partial", "in_flight"]
Proof = Literal["probe", "held"]


@dataclass(frozen=True, kw_only=True)
class Staleness(UserConfig):
    """How far rollouts may lag behind training. ``max_staleness``: versions that a trained token may be old; 0 trains
    synchronously, 1 one step off. ``policy``: what is done about rows that take long. "wait": steps wait for them. "drop": what would be
    too old expires, and others are generated in its place. "count": it is trained, however old; only the number of rows
    under way is bounded. Also the name of another one that is installed, "module:name" of one that can be imported here, its class, or
    any of these with options: ("mine", {"share": 0.25})."""

    max_staleness: int = 1
    policy: str | Callable[..., Any] | tuple[str | Callable[..., Any], Mapping[str, Any]] = "wait"

    def __post_init__(self) -> None:
        check_types(Staleness, {"max_staleness": self.max_staleness})
        if self.max_staleness < 0:
            raise ConfigError(f"max_staleness must be 0 or more, not {self.max_staleness}")
        if isinstance(self.policy, list):  # a pair that was written down
            object.__setattr__(self, "policy", tuple(self.policy))
        of, options = self.policy if isinstance(self.policy, tuple) and len(self.policy) == 2 else (self.policy, {})
        if not (isinstance(of, str) or callable(of)) or not isinstance(options, Mapping):
            raise ConfigError(
                f"a staleness policy is a name, a class, or either with options, not {self.policy!r:.100}"
            )


@dataclass(frozen=True, kw_only=True)
class Sampling(UserConfig):
    """How tokens are drawn. ``temperature``: 0 takes the likeliest token each time. ``max_tokens``: of a response. ``top_p``: only from
    the likeliest tokens that together have this much probability, 1 from all; ``top_k``: only from so many, 0 from all. ``seed``:
    None draws differently each run. ``stop_ids``: token ids that end a response beside the model's own; they are its last token.
    ``stop``: the same as text, each of one token, which a rollout's tokenizer encodes before an engine is asked. Engines end a response
    at no text of several tokens.

    top_p and top_k cut what is drawn from, and no log-prob: that of a token is always under the whole vocabulary at
    ``temperature``, and at temperature 1 where that is 0. It is what a trainer computes for the same tokens.
    """

    temperature: float = 1.0
    max_tokens: int = 256
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_ids: tuple[int, ...] = ()
    stop: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens must be 1 or more, not {self.max_tokens}")
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature must be 0 (greedy) or more, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        if not all(self.stop):
            raise ConfigError("stop is text of one token each; an empty text is none")
        if any(token < 0 for token in self.stop_ids):
            raise ConfigError(f"stop_ids are token ids from 0, not {list(self.stop_ids)}")
        if self.top_k < 0:
            raise ConfigError(f"top_k must be 0 (off) or more, not {self.top_k}")


@dataclass(frozen=True, kw_only=True)
class Weights(UserConfig):
    """How new versions get from the trainer to the replicas, and when these load them.

    ``transport``, ``options``: by which, made with which options. ``dtype``: floating-point tensors are published in it; None
    leaves them. ``swap``: replicas load a version after draining ("drain"), when nothing runs in them anyway ("boundary"),
    interrupting what runs, which goes on after ("partial"), or while requests run ("in_flight"). "auto", of either: what all of the
    run can do, chosen before anything starts and told with the reason. ``keep``: so many versions, the newest, can be fetched and rolled back to.
    ``max_swapping``: so many replicas load at once, 0 for all. ``quorum``: so many must have a version staged before any loads
    it, and others are given nothing until they follow; 0 for none. ``probe``: sequences whose log-probs the trainer publishes
    with each version. ``verify``: what a load must prove beyond names: "probe", "held" (see ``RolloutEngine``); a probe
    is compared unasked by engines that can.
    """

    transport: str = "auto"
    dtype: str | None = None
    swap: SwapPolicy = "auto"
    keep: int = 2
    max_swapping: int = 0
    quorum: int = 0
    probe: Probe | None = None
    verify: Sequence[Proof] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types(
            Weights, {name: value for name, value in vars(self).items() if name not in ("dtype", "probe", "verify")}
        )
        if self.keep < 1:
            raise ConfigError(f"keep must be 1 or more, not {self.keep}: the version that is current is one of them")
        if self.max_swapping < 0 or self.quorum < 0:
            raise ConfigError(
                f"max_swapping and quorum are 0 (off) or more, not {self.max_swapping} and {self.quorum}"
            )
        if self.dtype is not None:
            check_floating(self.dtype)
        check_policy(self.swap)
        check_proofs(self.verify)
        if "probe" in self.verify and self.probe is None:
            raise ConfigError('verify asks for a probe, and there is none: give probe=, or leave "probe" out')
        if self.probe is not None:
            object.__setattr__(self, "probe", validate_probe(self.probe, scored=False))


@dataclass(frozen=True, kw_only=True)
class Checkpoint(UserConfig):
    """How a run can be gone on with: a checkpoint of the trainer after every so many steps. ``keep``: so many, the newest; the
    rows of steps since the oldest of them keep their memory. ``history``: keep the journal of the whole run, for replays."""

    every: int = 50
    keep: int = 2
    history: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.every < 1 or self.keep < 1:
            raise ConfigError(f"every and keep are 1 or more, not {self.every} and {self.keep}")


def check_policy(swap: str) -> None:
    """Raises ConfigError unless this is a swap policy."""
    if swap not in get_args(SwapPolicy):
        raise ConfigError(f"swap is one of {', '.join(get_args(SwapPolicy))}, not {swap!r}")


def check_proofs(verify: Sequence[str]) -> None:
    """Raises ConfigError unless these are proofs."""
    for proof in [verify] if isinstance(verify, str) else verify:
        if isinstance(verify, str) or proof not in get_args(Proof):
            raise ConfigError(
                f"verify is a list of {' and '.join(map(repr, get_args(Proof)))}, not {verify!r}; names are always compared"
            )
