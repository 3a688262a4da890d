"""The plan of a workflow: by what weights travel, in which form, and when each rollout loads them; each with its reason.

It is made before anything starts, of what engines, transports and launchers declare (``can`` of an AdapterSpec). What an engine does
not declare is asked of it in its worker, before it takes a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import ConfigError, PluginError
from ..plugins import registry
from ..weights import AUTO, Choice, choose_encoding, choose_swap, choose_transport
from .specs import Rollout

if TYPE_CHECKING:
    from .checking import Key, Problems
    from .workflow import Workflow


@dataclass(frozen=True)
class Plan:
    """``transport``: of the weights. ``swaps``: of each rollout; "auto" where its worker is to ask its engine. ``choices``: all
    that were made, with reasons."""

    transport: str
    swaps: tuple[str, ...]
    choices: tuple[Choice, ...]


def planned(flow: Workflow, problems: Problems) -> Plan:
    """The plan; what cannot work is told to ``problems``."""
    choices: list[Choice] = []
    swaps: list[str] = []
    weights = flow.weights
    transport = weights.transport
    with problems.kept("weights", "transport"):
        choice = choose_transport(_elsewhere(flow), _only(flow), asked=weights.transport)
        choices.append(_with_device(flow, choice))
        transport = choice.chosen
        encoding = choose_encoding(transport, weights.keep, weights.options)
        choices += [encoding] if encoding is not None else []
    for number, rollout in enumerate(flow.rollouts):
        asked: str = rollout.swap or weights.swap
        where: Key = ("rollout", number, "swap") if rollout.swap else ("weights", "swap")
        with problems.kept(*where):
            choice = _swap(rollout, asked, tuple(weights.verify if rollout.verify is None else rollout.verify))
            choices.append(choice)
            asked = choice.chosen
        swaps.append(asked)
    return Plan(transport, tuple(swaps), tuple(choices))


def _swap(rollout: Rollout, asked: str, verify: tuple[str, ...]) -> Choice:
    what, engine = f"swap of {rollout.task} {rollout.engine}", f"engine {rollout.engine!r}"
    can = _said(rollout, "swap")
    if can is not None:
        chosen = choose_swap(engine, set(can), asked, verify=verify)
        return Choice(what, chosen.chosen, chosen.reason)
    if asked != AUTO:
        return Choice(what, asked, f"as asked; {engine} says in its worker whether it can")
    return Choice(what, AUTO, f"{engine} says in its worker what it can, before the first prompt")


def _said(rollout: Rollout, key: str) -> tuple[str, ...] | None:
    adapter = registry().find("rollout", rollout.engine)
    return adapter.spec.declared(key) if adapter is not None else None


def _only(flow: Workflow) -> dict[str, tuple[str, ...]]:
    """Of engines that cannot take weights by any transport, those they can."""
    only = {}
    for rollout in flow.rollouts:
        names = _said(rollout, "transports")
        if names is not None:
            only[f"engine {rollout.engine!r}"] = names
    return only


def _elsewhere(flow: Workflow) -> str:
    """Why some workers may be on other hosts; "" where none is."""
    for place in (*(each.place for each in flow.rollouts), flow.train.place):
        adapter = registry().find("launcher", place.launcher)
        if adapter is not None and adapter.spec.declared("hosts") == ("many",):
            return f"launcher {place.launcher!r} may start workers on other hosts"
    return ""


def _with_device(flow: Workflow, choice: Choice) -> Choice:
    """Where all is on GPUs of one host there would be another way, which is not taken unasked."""
    options = (*(each.options for each in flow.rollouts), flow.train.options)
    devices = [each.get("device", "auto") for each in options]
    if (
        choice.chosen != "shm"
        or flow.weights.transport != AUTO
        or not all(str(d).startswith("cuda") for d in devices)
    ):
        return choice
    try:
        there = not registry().get("transport", "cuda-ipc").missing
    except (PluginError, ConfigError):
        there = False
    more = "; cuda-ipc would leave them on the GPU, and has to be asked for, as it was not run on one yet"
    return Choice(choice.what, choice.chosen, choice.reason + more) if there else choice
