"""From what a child left behind to one status and one reason.

    exit code · signal · run.json · the document on stdout · time · the kernel's kills ──► Outcome

What the run says of itself comes first; where it could not say anything, how the child ended is what is known, and
no more than that: SIGKILL is out of memory only where the kernel's killer was counted meanwhile. Pure but for reading
the run folder.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowtide.errors import InputError
from lowtide.run_record import RunResult, RunStatus
from lowtide.system.run_report import facts_of, outcome_of
from lowtide.system.run_state import RunState, read_run

__all__ = ["Ended", "Outcome", "judge_child"]

_NO_LONGER = 2000
_NO_END = ("running", "lost")
"""What run.json says, or reads as, where nobody wrote how the run ended."""


@dataclass(frozen=True)
class Ended:
    """How a child ended, as its parent saw it."""

    exit_code: int | None
    """What it returned; None where it had to be killed."""
    signal: int | None
    """What killed it, if it was not the sweep."""
    timed_out: bool
    oom_kills: int
    """How often the kernel's out-of-memory killer struck while it ran."""
    stdout: str
    stderr: str
    """The last of each."""
    timeout_s: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """What became of one attempt at a cell."""

    status: RunStatus
    reason: str | None
    error_type: str | None = None
    error_rank: int | None = None
    result: RunResult | None = None
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    final: bool = False
    """Whether trying again cannot help: the config itself is wrong."""


def judge_child(ended: Ended, folder: Path) -> Outcome:
    """Judge a child that is gone; ``folder`` is where its run folder would be."""
    state = _state(folder)
    facts = {} if state is None else facts_of(folder, state)
    if state is not None and state.status == "out_of_memory":
        return _failure("out_of_memory", state.error_message or "an allocation failed", state, facts)
    if ended.timed_out:
        done = " (the run itself was done, and its processes did not end)" if _done(state) else ""
        return Outcome("timeout", f"not done within {ended.timeout_s:g} s, and ended{done}", facts=facts)
    if ended.exit_code == 0:
        return _of_success(state, folder, facts)
    if _killed(ended, state):
        return _of_kill(ended, state, facts)
    return _of_failure(ended, state, facts)


def _of_success(state: RunState | None, folder: Path, facts: dict[str, Any]) -> Outcome:
    if state is None:
        reason = f"it ended with exit code 0 and left no result: there is no readable {folder.name}/run.json"
        return Outcome("error", reason, "NoResult", facts=facts)
    status, reason, result = outcome_of(state)
    if state.status in _NO_END:
        reason = "run.json says that it still runs"
    if status == "ok" and result is not None:
        wanted = _wanted_steps(facts.get("config"))
        if wanted is None or result.steps == wanted:
            return Outcome("ok", None, result=result, facts=facts)
        reason = f"it did {result.steps} of {wanted} steps"
    said = f"it ended with exit code 0 and left no result: {reason}"
    return Outcome("error", said, "NoResult", facts=facts)


def _killed(ended: Ended, state: RunState | None) -> bool:
    """Whether SIGKILL is all that is known of the end."""
    if state is not None and state.error_type == "RankKilled":
        return "(SIGKILL)" in (state.error_message or "")
    document = _document(ended.stdout)
    error = document.get("error")
    if isinstance(error, dict) and error.get("type") == "RankKilled":
        return "(SIGKILL)" in str(error.get("message"))
    return ended.signal == signal.SIGKILL or ended.exit_code == 128 + signal.SIGKILL


def _of_kill(ended: Ended, state: RunState | None, facts: dict[str, Any]) -> Outcome:
    error = _error(ended, state)
    rank = error.get("rank")
    who = "the launcher" if rank is None else f"rank {rank}"
    if ended.oom_kills:
        reason = f"the kernel's out-of-memory killer struck while it ran ({ended.oom_kills} times); {who} was killed"
        return Outcome("out_of_memory", reason, "OomKilled", rank, facts=facts)
    return Outcome("error", f"SIGKILL, cause unknown ({who} was killed)", "Killed", rank, facts=facts)


def _of_failure(ended: Ended, state: RunState | None, facts: dict[str, Any]) -> Outcome:
    error = _error(ended, state)
    final = ended.exit_code == 2
    if error.get("message"):
        kind, message = error.get("type"), str(error["message"])
        plain = kind in (None, "RunOutOfMemoryError", "RankKilled", "RankLost", "Killed", "LaunchFailed")
        text = message if plain else f"{kind}: {message}"
        return Outcome("error", text, kind, error.get("rank"), facts=facts, final=final)
    how = f"exit code {ended.exit_code}"
    if ended.signal is not None:
        how = f"killed by {_name(ended.signal)}"
    last = _last_line(ended.stderr)
    said = f"{how}, and it left no result" + (f"; its last words: {last}" if last else "")
    return Outcome("error", said, "NoResult", facts=facts, final=final)


def _failure(status: RunStatus, reason: str, state: RunState, facts: dict[str, Any]) -> Outcome:
    error = state.record.get("error") or {}
    return Outcome(status, reason, state.error_type, error.get("rank"), facts=facts)


def _error(ended: Ended, state: RunState | None) -> Mapping[str, Any]:
    """Return type, message and rank of the error, from run.json or else from the document on stdout."""
    if state is not None and state.status not in ("done", *_NO_END):
        told = state.record.get("error") or {}
        return {"type": state.error_type, "message": state.error_message, "rank": told.get("rank")}
    error = _document(ended.stdout).get("error")
    if not isinstance(error, dict):
        return {}
    return {"type": error.get("type") or error.get("kind"), "message": error.get("message"), "rank": error.get("rank")}


def _document(stdout: str) -> dict[str, Any]:
    start = stdout.find("{")
    try:
        found = json.loads(stdout[start:]) if start >= 0 else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _state(folder: Path) -> RunState | None:
    try:
        return read_run(folder)
    except InputError:
        return None


def _done(state: RunState | None) -> bool:
    return state is not None and state.status == "done"


def _wanted_steps(config: Any) -> int | None:
    training = config.get("training") if isinstance(config, dict) else None
    steps = training.get("steps") if isinstance(training, dict) else None
    return steps if isinstance(steps, int) else None


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:_NO_LONGER] if lines else ""


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
