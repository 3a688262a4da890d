"""User configuration: staleness, sampling, chats, probes, weights, checkpoints, stores. Frozen and validated."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from ..errors import ConfigError
from .defaults import CHECKPOINT_STEPS, HOME_SILENCE_S, KEEP_CHECKPOINTS, KEEP_VERSIONS, MAX_STALENESS
from .dtypes import check_floating
from .validation import UserConfig, check_above, check_fields, check_least, check_types

SwapPolicy = Literal["auto", "drain", "boundary", "partial", "in_flight"]
Proof = Literal["probe", "held"]
_OFF = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "stop_ids": (), "stop": ()}
LOCAL = "local"
"""The store with one home, the server's memory."""


@dataclass(frozen=True, kw_only=True)
class Staleness(UserConfig):
    """The limit on how far rollouts lag behind training. ``max_staleness``: largest age of a trained token, in
    versions; 0: synchronous training, 1: one step off. ``policy``: the treatment of slow rows. "wait": steps wait for
    them. "drop": rows that would be too old expire and are replaced. "count": they are trained at any age; only the
    number of rows in progress is bounded. Also another installed policy's name, an importable "module:name", a class,
    or one of these with options: ("mine", {"share": 0.25})."""

    max_staleness: int = MAX_STALENESS
    policy: str | Callable[..., Any] | tuple[str | Callable[..., Any], Mapping[str, Any]] = "wait"

    def __post_init__(self) -> None:
        check_types(Staleness, {"max_staleness": self.max_staleness})
        check_least(0, max_staleness=self.max_staleness)
        if isinstance(self.policy, list):  # a pair decoded from JSON
            object.__setattr__(self, "policy", tuple(self.policy))
        of, options = self.policy if isinstance(self.policy, tuple) and len(self.policy) == 2 else (self.policy, {})
        if not (isinstance(of, str) or callable(of)) or not isinstance(options, Mapping):
            raise ConfigError(
                f"a staleness policy must be a name, a class, or either with options, not {self.policy!r:.100}"
            )


@dataclass(frozen=True, kw_only=True)
class Sampling(UserConfig):
    """Sampling parameters of generation.

    ``temperature``: 0: greedy. ``max_tokens``: of a response. ``top_p``: sample from the most likely tokens
    with this total probability; 1: from all. ``top_k``: sample from this many most likely tokens; 0 or -1: from
    all. ``min_p``: sample from tokens with this share of the most likely one's probability.
    ``repetition_penalty``: divide positive logits of the tokens of prompt and response by it, and multiply
    negative ones; 1: unchanged. None of these: no limit. An engine that cannot give the log-probs below with
    one of them is refused. ``seed``: None: the workflow's; without one, draws differ in each run.

    ``stop_ids``: token ids that end a response, beside the model's own end token; kept as its last token.
    ``stop``: texts that end a response, within a token or over several: its ids and log-probs go to the token
    that completes the text, its text ends before it. A special token's text is one of ``stop_ids``. ``extra``:
    parameters of the engine's own (``Capabilities.extra``).

    Nothing of this changes log-probs: these are over the whole vocabulary at ``temperature``, or at 1 for
    temperature 0, as the trainer computes them. ``sampling_mask``: over the tokens left of each draw by top_p, top_k
    and min_p, in training, too. Columns kept_ids and kept_ids_counts hold them; 0: it was not cut."""

    temperature: float = 1.0
    max_tokens: int = 256
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_ids: tuple[int, ...] = ()
    stop: str | Sequence[str] = ()
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    sampling_mask: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if (value is None and name != "seed") or (name == "top_k" and value == -1):
                object.__setattr__(self, name, _OFF.get(name))
            elif isinstance(value, float) and name in ("max_tokens", "top_k", "seed") and value.is_integer():
                object.__setattr__(self, name, int(value))
        check_fields(self)
        object.__setattr__(self, "extra", dict(self.extra))  # an engine may change its own
        check_least(1, max_tokens=self.max_tokens)
        if self.seed is not None and self.seed < 0:
            raise ConfigError(f"seed must be 0 or more, not {self.seed}; leave it out for the workflow's")
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature must be 0 (greedy) or more, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        if not all(self.stop):
            raise ConfigError("stop must be texts, not empty")
        if any(token < 0 for token in self.stop_ids):
            raise ConfigError(f"stop_ids must be token ids from 0, not {list(self.stop_ids)}")
        check_least(0, top_k=self.top_k, min_p=self.min_p)
        check_above(0, repetition_penalty=self.repetition_penalty)
        if self.min_p > 1 or self.repetition_penalty == math.inf:
            raise ConfigError(f"min_p is at most 1, and repetition_penalty finite, not {self.min_p} and inf")

    @property
    def restrictions(self) -> dict[str, float]:
        """The parameters that change draws and not log-probs, with their values."""
        return {name: value for name, off in _OFF.items() if off != () and (value := getattr(self, name)) != off}


@dataclass(frozen=True, kw_only=True)
class Chat(UserConfig):
    """Arguments of the model's chat template, as ``chat_template_kwargs={"enable_thinking": False}``.
    ``system_prompt``: the first message, unless a chat has one. ``tools``: JSON schemas of functions, or the
    column with each chat's. ``control_tokens``: True if messages may hold some; default: plain text."""

    system_prompt: str = ""
    tools: Sequence[Mapping[str, Any]] | str = ()
    control_tokens: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)


class Probe(msgspec.Struct, frozen=True, array_like=True):
    """``prompt_ids`` and ``response_ids``: token ids of each sequence. ``logprobs``: natural
    log-prob of each response token, computed by the trainer; empty until then. ``tolerance``:
    largest accepted absolute difference; use 1e-3 for float32 and about 5e-2 for bfloat16."""

    prompt_ids: tuple[tuple[int, ...], ...]
    response_ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...] = ()
    tolerance: float = 1e-3


def validate_probe(probe: Any, *, scored: bool) -> Probe:
    """Return the probe with plain numbers. ``scored``: require log-probs. Raises ConfigError for an invalid one."""
    if not isinstance(probe, Probe):
        raise ConfigError(
            f"a probe must be an af.Probe(prompt_ids, response_ids, logprobs), not {type(probe).__name__}"
        )
    try:
        plain = msgspec.convert(msgspec.to_builtins(probe, enc_hook=_listed), Probe)
    except (TypeError, ValueError, RecursionError) as error:
        text = str(error).replace("$[0]", "prompt_ids").replace("$[1]", "response_ids").replace("$[2]", "logprobs")
        raise ConfigError(f"the probe must be lists of token ids and log-probs: {text}") from None
    prompts, responses = plain.prompt_ids, plain.response_ids
    if not prompts or len(prompts) != len(responses):
        raise ConfigError(
            f"a probe needs at least one prompt, and as many responses, not {len(prompts)} and {len(responses)}"
        )
    for number, pair in enumerate(zip(prompts, responses, strict=True)):
        if not all(pair):
            raise ConfigError(f"sequence {number} of the probe has no prompt or no response")
    given, wanted = [len(row) for row in plain.logprobs], [len(row) for row in responses]
    if given != wanted and (given or scored):
        raise ConfigError(
            f"the probe has responses of {wanted} tokens and log-probs of {given}: one a token is expected"
        )
    if not plain.tolerance >= 0:
        raise ConfigError(f"the probe's tolerance must be 0 or more, not {plain.tolerance}")
    return plain


def _listed(value: Any) -> Any:
    """Convert numbers and arrays of numpy and torch."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not a number")


@dataclass(frozen=True, kw_only=True)
class Weights(UserConfig):
    """Transfer of new versions from the trainer to the replicas.

    ``transport``: "auto", "shm", "tcp", …; ``options``: its keyword arguments. ``dtype``: convert floating-point
    tensors to it; None: unchanged. ``swap``: load a version after draining ("drain"), between requests ("boundary"),
    by interrupting requests and continuing them afterwards ("partial"), or during requests ("in_flight"). "auto" of
    ``transport`` and ``swap``: the best choice supported by the whole run, made before the start and reported with
    its reason. ``keep``: number of newest versions available for fetches and rollbacks. ``max_swapping``: replicas
    loading at once, beside those that get no prompts before they load; 0: all. ``quorum``: replicas that must have a
    version staged before any loads it; the others then get no rows until they follow; 0: none. ``probe``: sequences
    published with the trainer's log-probs of each version; None: a default where bytes cannot be compared; False:
    none. ``verify``: checks of a load beyond names: "probe", "held" (see ``RolloutEngine``). Engines with log-probs
    compare a probe in any case."""

    transport: str = "auto"
    dtype: str | None = None
    swap: SwapPolicy = "auto"
    keep: int = KEEP_VERSIONS
    max_swapping: int = 0
    quorum: int = 0
    probe: Probe | bool | None = None
    verify: Sequence[Proof] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types(Weights, {name: value for name, value in vars(self).items() if name not in ("dtype", "probe")})
        if self.keep < 1:
            raise ConfigError(f"keep must be 1 or more, not {self.keep}: the current version counts")
        check_least(0, max_swapping=self.max_swapping, quorum=self.quorum)
        if self.dtype is not None:
            check_floating(self.dtype)
        if "probe" in self.verify and not self.probe:
            raise ConfigError('verify needs a probe: give probe=, or leave "probe" out')
        if self.probe is not None and self.probe is not False:
            object.__setattr__(self, "probe", validate_probe(self.probe, scored=False))


@dataclass(frozen=True, kw_only=True)
class Checkpoint(UserConfig):
    """Checkpoints of the trainer, for resuming a run. ``every``: steps between two. ``keep``:
    number of newest checkpoints kept; rows of the steps since the oldest of them stay in memory.
    ``history``: keep the journal of the whole run, for replays."""

    every: int = CHECKPOINT_STEPS
    keep: int = KEEP_CHECKPOINTS
    history: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        check_least(1, every=self.every, keep=self.keep)


@dataclass(frozen=True, kw_only=True)
class Store(UserConfig):
    """Where the columns of rows stay. ``kind``: "local", in the memory of the server's host; "hosts", on the host
    that makes them, served by a storage unit there, which its first worker or ``asyncflow store`` starts; or another
    installed store. ``options``: its keyword arguments. ``silence_s``: a host without a storage unit for this long
    (seconds) is lost: rows with columns there fail, and a feeder puts their prompts again."""

    kind: str = LOCAL
    silence_s: float = HOME_SILENCE_S
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        check_above(0, silence_s=self.silence_s)

    @classmethod
    def of(cls, store: str | Store) -> Store:
        """Return a store that may be given by its kind alone."""
        return store if isinstance(store, Store) else cls(kind=store)
