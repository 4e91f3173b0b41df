"""Experiment ids: when, what and which.

    20261201-041500 - 3fa91c07 - 9d2e
    UTC, to the second  hash of the resolved config's content  random

The hash is of content, not of a path or of the order of keys: two runs with the same hash had the same
settings. The random part keeps apart runs that start in the same second. An id is made once, on rank 0, and
shared (``ranks.on_main``); an id from outside must stay one plain folder name inside the runs folder.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from lowtide.errors import ConfigError
from lowtide.training.config import config_hash
from lowtide.training.ranks import on_main

__all__ = ["agree_on_id", "check_experiment_id", "new_experiment_id"]

_LEGAL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*", re.ASCII)
_LONGEST = 128


def new_experiment_id(resolved: Mapping[str, Any], *, now: datetime | None = None) -> str:
    """Make an id for a run of this config; ``now`` in any time zone, by default the present."""
    moment = (now or datetime.now(UTC)).astimezone(UTC)
    return f"{moment:%Y%m%d-%H%M%S}-{config_hash(resolved)[:8]}-{secrets.token_hex(2)}"


def check_experiment_id(experiment_id: str) -> str:
    """Return the id if it is one safe folder name.

    Raises:
        ConfigError: it is empty, too long, starts with a dot or a dash or holds other characters.
    """
    if not isinstance(experiment_id, str) or _LEGAL.fullmatch(experiment_id) is None:
        raise ConfigError(
            f"the experiment id {experiment_id!r} is not legal: letters, digits, '.', '_' and '-' only, "
            f"at least one of them, and no '.' or '-' at the start"
        )
    if len(experiment_id) > _LONGEST:
        raise ConfigError(
            f"the experiment id {experiment_id[:20]!r}... has {len(experiment_id)} characters; "
            f"{_LONGEST} at most are legal"
        )
    return experiment_id


def agree_on_id(resolved: Mapping[str, Any], *, experiment_id: str | None = None) -> str:
    """Return one id on every rank: rank 0's ``experiment_id`` after checking, or a new one made there.

    Raises:
        ConfigError: the id is not legal; on every rank.
    """

    def choose() -> str:
        return new_experiment_id(resolved) if experiment_id is None else check_experiment_id(experiment_id)

    return on_main(choose)
