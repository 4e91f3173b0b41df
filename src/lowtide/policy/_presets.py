"""Policies that name what others do, as YAML files beside this one: ordinary policies, to use or to copy from."""

from __future__ import annotations

from importlib import resources
from typing import Any

from lowtide.errors import PolicyError, nearest

__all__ = ["named_policy", "preset_names"]

_WITHOUT_KEYS = ("none", "full")


def preset_names() -> tuple[str, ...]:
    """List the presets."""
    folder = resources.files("lowtide.policy") / "presets"
    return tuple(sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml")))


def named_policy(name: str) -> dict[str, Any]:
    """Return the policy that a name stands for, as a mapping: a preset, or a kind that needs no keys.

    Raises:
        PolicyError: no such preset; the message lists those there are.
    """
    import yaml

    if name in _WITHOUT_KEYS:
        return {"kind": name}
    names = preset_names()
    if name not in names:
        near = nearest(name, names, count=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise PolicyError(
            f"policy: {name!r} is no preset; there are: {', '.join(names)}.{hint} A kind is a mapping: {{kind: full}}"
        )
    text = (resources.files("lowtide.policy") / "presets" / f"{name}.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)
