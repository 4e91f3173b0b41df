"""The trainer: one loop, whose variation comes from a config.

    config ─► registry ─► build ─► parallelize ─► loop ─► events ─► tracking
                                                   └──► checkpoint

Importing this package imports no torch: its public names load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowtide.training.config import LoadedConfig, TrainConfig, load_config
    from lowtide.training.entry import run
    from lowtide.training.summary import Summary

_HOMES = {
    "Summary": "lowtide.training.summary",
    "LoadedConfig": "lowtide.training.config",
    "TrainConfig": "lowtide.training.config",
    "load_config": "lowtide.training.config",
    "run": "lowtide.training.entry",
}

__all__ = ["LoadedConfig", "Summary", "TrainConfig", "load_config", "run"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'lowtide.training' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
