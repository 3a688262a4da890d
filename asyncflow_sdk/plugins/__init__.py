"""Plugins: one hook, which registers engines, transports and all other adapters.

    # mine/plugin.py, named in pyproject.toml under [project.entry-points.asyncflow_sdk]
    import asyncflow_sdk as af

    @af.hookimpl
    def asyncflow_adapters():
        return [af.AdapterSpec(kind="rollout", name="mine", factory="mine.engine:Mine", requires=["mylib>=2"])]

The SDK imports a plugin module to list its adapters, so the module must not import its engine: the factory is a
string."""

from .discovery import (
    ONLY,
    WITHOUT,
    Adapter,
    Registry,
    find_plugins,
    import_name,
    import_path,
    plugin_variables,
    registry,
)
from .spec import GROUP, AdapterSpec, HookSpecs, Kind, hookimpl, hookspec

__all__ = [
    "GROUP", "ONLY", "WITHOUT", "Adapter", "AdapterSpec", "HookSpecs", "Kind", "Registry", "find_plugins", "hookimpl",
    "hookspec", "import_name", "import_path", "plugin_variables", "registry",
]  # fmt: skip
