"""Policies that name what others do, as YAML files beside this one: ordinary policies, to use or to copy from."""

from __future__ import annotations

from importlib import resources
from typing import Any

__all__ = ["named_policy", "preset_names"]


def preset_names() -> tuple[str, ...]:
    """List the presets."""
    folder = resources.files("lowtide.policy") / "presets"
    return tuple(sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml")))


def named_policy(name: str) -> dict[str, Any] | None:
    """Return the policy of a preset as a mapping; None where there is no such preset."""
    import yaml

    if name not in preset_names():
        return None
    text = (resources.files("lowtide.policy") / "presets" / f"{name}.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)
