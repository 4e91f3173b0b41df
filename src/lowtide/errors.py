"""The tree of lowtide's errors, and the words they are made of.

    LowtideError
    ├── UserError (ValueError)            the user's input is wrong             exit code 2
    │   ├── ConfigError                   a config file, a field, a --set value
    │   ├── InputError                    a file or folder that is missing or damaged
    │   └── PolicyError                   a policy that cannot be meant
    │       ├── NothingMatchedError       a pattern, operator or name that matched nothing
    │       └── RefusedError              this policy on this model would break a promise
    ├── DoesNotFitError                   no choice stays under the limit       exit code 3
    ├── StoppedError                      a signal came; the run saved          exit code 75
    └── FailedError (RuntimeError)        something went wrong while running    exit code 1
        ├── RecomputeError                a region's second forward differed from its first
        │   └── StateChangedError         what it reads was written between forward and backward
        ├── RunOutOfMemoryError           an allocation failed
        └── RankError                     a process of the run died or reported an error

Errors for users derive from ``UserError``; our own bugs are ``assert``. Every message names the object,
the value, what is legal and the fix, and is complete where it is raised: the public edge prints it as is.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "ConfigError",
    "DoesNotFitError",
    "FailedError",
    "InputError",
    "LowtideError",
    "NothingMatchedError",
    "PolicyError",
    "RankError",
    "RecomputeError",
    "RefusedError",
    "RunOutOfMemoryError",
    "StateChangedError",
    "StoppedError",
    "UserError",
    "find_error",
    "listing",
    "nearest",
]


class LowtideError(Exception):
    """Everything that lowtide raises on purpose."""

    exit_code: int = 1


class UserError(LowtideError, ValueError):
    """The user's input is wrong: never retried, never restarted."""

    exit_code = 2


class ConfigError(UserError):
    """A config file, a field of it, or a value given with ``--set``."""


class InputError(UserError):
    """A file or folder that the user named and that is missing, damaged or of the wrong kind."""


class PolicyError(UserError):
    """A policy that cannot be meant: wrong values, overlapping regions, an unknown operator."""


class NothingMatchedError(PolicyError):
    """A layer pattern, a module pattern, an operator or a name matched nothing."""


class RefusedError(PolicyError):
    """Applying the policy here would change gradients, names or identities; the message names the way out."""


class DoesNotFitError(LowtideError):
    """No choice of what to keep stays under the memory limit."""

    exit_code = 3


class StoppedError(LowtideError):
    """The run was asked to stop, and saved before it did."""

    exit_code = 75


class FailedError(LowtideError, RuntimeError):
    """Something went wrong while running, through no fault of the input."""


class RecomputeError(FailedError):
    """A region's recompute did not repeat its forward: its gradients would be wrong."""


class StateChangedError(RecomputeError):
    """A tensor that a region reads was changed in place between forward and backward."""


class RunOutOfMemoryError(FailedError):
    """An allocation failed, on a device or on the host."""


class RankError(FailedError):
    """A process of the run died or reported an error."""


def nearest(name: str, candidates: Iterable[str], *, count: int = 3) -> list[str]:
    """Return up to ``count`` candidates that look most like ``name``, the best first."""
    pool = list(dict.fromkeys(candidates))
    found = [c for c in pool if c.lower() == name.lower()]
    found += [c for c in difflib.get_close_matches(name, pool, n=count, cutoff=0.5) if c not in found]
    tail = name.rsplit(".", 1)[-1].lower()
    found += [c for c in pool if c not in found and tail and tail in c.lower()]
    return found[:count]


def listing(names: Iterable[str], *, limit: int = 12) -> str:
    """Join names for a message; past ``limit`` say how many more there are."""
    pool = list(names)
    shown = ", ".join(pool[:limit])
    return f"{shown} and {len(pool) - limit} more" if len(pool) > limit else shown


def find_error(error: BaseException, kind: type[LowtideError] = LowtideError) -> LowtideError | None:
    """Find the first error of ``kind`` along ``__cause__`` and ``__context__``: others may wrap ours."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        if isinstance(current, kind):
            return current
        seen.add(id(current))
        current = current.__cause__ or current.__context__
    return None
