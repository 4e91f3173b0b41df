"""From what the ranks and torch's agent left behind to one exit code, one cause and one message.

    rank files + agent.json ──► candidates (killed · raised here · gone without a word) ──► Verdict

The first failure makes others: a rank whose neighbour died reports "connection closed by peer", and the agent
then ends the rest with SIGTERM. So a rank that the kernel killed comes before what others raised, an error of
ours before those that merely tell of a lost neighbour, and among equals the earlier one. Pure: nothing is
read here.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowtide.system.run_state import Status

__all__ = ["Verdict", "judge", "tells_of_a_lost_neighbour"]

_NEIGHBOUR_LOST = re.compile(
    r"connection (closed|reset|refused|was likely closed|lost)|broken pipe|socket.*closed|communicator was aborted"
    r"|timed out|timeout|remote process exited|could not set up the group",
    re.IGNORECASE,
)
# The agent sends SIGTERM first and SIGKILL 30 s later; a kill this long after the first death is its own.
_AGENT_KILLS_AFTER_S = 20


@dataclass(frozen=True)
class Verdict:
    """How a launch ended."""

    exit_code: int
    status: Status
    message: str = ""
    rank: int | None = None
    error_type: str | None = None
    traceback: str = ""

    @property
    def error(self) -> dict[str, Any] | None:
        """What run.json keeps of it."""
        if self.error_type is None:
            return None
        return {"type": self.error_type, "message": self.message, "rank": self.rank}


def judge(
    reports: Mapping[int, Mapping[str, Any]],
    *,
    agent: Mapping[str, Any],
    nproc: int,
    stopped_by: str | None = None,
    gave_up: bool = False,
) -> Verdict:
    """Judge a launch whose processes are all gone.

    Args:
        reports: what each rank wrote, by rank.
        agent: what the agent wrote; empty where it ended well, or was killed.
        nproc: how many ranks there were to be.
        stopped_by: the signal that our launcher passed on, if any.
        gave_up: whether our launcher had to kill what did not stop.
    """
    ended = {rank: report for rank, report in reports.items() if report.get("ended")}
    statuses = [report["status"] for report in ended.values()]
    if len(ended) == nproc and all(status == "done" for status in statuses):
        return Verdict(0, "done")
    raised = [report for report in ended.values() if report.get("error") and report["status"] != "stopped"]
    if not raised and "stopped" in statuses and not gave_up:
        text = min((r for r in ended.values() if r["status"] == "stopped"), key=_when)
        return Verdict(75, "stopped", text["error"]["message"], text["rank"], text["error"]["type"])
    killed = None if stopped_by or gave_up else _killed(ended, agent)
    cause = _first_raised(raised)
    if killed is not None and (cause is None or not _is_own(cause)):
        return killed
    if cause is not None and not (stopped_by and cause["error"]["type"] == "KeyboardInterrupt"):
        return _of_report(cause)
    return _of_silence(reports, ended, agent, nproc, stopped_by, gave_up=gave_up)


def _when(report: Mapping[str, Any]) -> float:
    return float(report["at"])


def _is_own(report: Mapping[str, Any]) -> bool:
    """Whether an error can be the beginning: not heard from rank 0, not about a lost neighbour."""
    error = report["error"]
    if error["elsewhere"] or error["type"] == "RankError":
        return False
    return error["ours"] or not tells_of_a_lost_neighbour(error["message"])


def tells_of_a_lost_neighbour(message: str) -> bool:
    """Whether an error's text is what a rank says when another one has gone."""
    return _NEIGHBOUR_LOST.search(message) is not None


def _first_raised(raised: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    return min(raised, key=lambda r: (not _is_own(r), r["error"]["elsewhere"], _when(r)), default=None)


def _of_report(report: Mapping[str, Any]) -> Verdict:
    error, rank = report["error"], report["rank"]
    message = error["message"] if error["ours"] else f"rank {rank} failed: {error['type']}: {error['message']}"
    return Verdict(
        exit_code=report["exit_code"] if error["ours"] else 1,
        status=report["status"],
        message=message,
        rank=rank,
        error_type=error["type"],
        traceback="" if error["ours"] else error["traceback"],
    )


def _killed(ended: Mapping[int, Mapping[str, Any]], agent: Mapping[str, Any]) -> Verdict | None:
    """Find a rank that was killed by something that is neither our launcher nor the agent."""
    failures = list(agent.get("failures", []))
    for index, failed in enumerate(failures):
        if failed["exit_code"] >= 0 or failed["rank"] in ended:
            continue
        by_agent = index > 0 and (
            -failed["exit_code"] == signal.SIGTERM or failed["at"] - failures[0]["at"] >= _AGENT_KILLS_AFTER_S
        )
        if not by_agent:
            return _of_signal(failed["rank"], -failed["exit_code"])
    return None


def _of_signal(rank: int, number: int) -> Verdict:
    name = _name(number)
    hints = {
        "SIGKILL": "out of memory on the host is a common cause: look for it in `dmesg` or the scheduler's log",
        "SIGSEGV": "a crash in native code; set PYTHONFAULTHANDLER=1 to see where",
        "SIGBUS": "often a full /dev/shm",
        "SIGABRT": "native code gave up; its last words are above",
        "SIGTERM": "somebody asked this one process to end; a scheduler's time limit is a common cause",
    }
    hint = f"; {hints[name]}" if name in hints else ""
    return Verdict(1, "failed", f"rank {rank} was killed by signal {number} ({name}){hint}", rank, "RankKilled")


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _of_silence(
    reports: Mapping[int, Mapping[str, Any]],
    ended: Mapping[int, Mapping[str, Any]],
    agent: Mapping[str, Any],
    nproc: int,
    stopped_by: str | None,
    *,
    gave_up: bool,
) -> Verdict:
    """Judge ranks that said nothing about their end."""
    if stopped_by and gave_up:
        return Verdict(1, "failed", f"killed: it did not stop in time after {stopped_by}", None, "Killed")
    if stopped_by:
        return Verdict(1, "failed", f"ended by {stopped_by} before anything could be saved", None, "Killed")
    if agent.get("died"):
        number = int(agent["died"])
        message = f"torch's launcher was killed by signal {number} ({_name(number)}), and every rank with it"
        return Verdict(1, "failed", message, None, "LaunchFailed")
    if agent.get("broken"):
        message = "the processes could not be started by torch.distributed.run"
        return Verdict(1, "failed", message, None, "LaunchFailed", str(agent["broken"]))
    codes = {failed["rank"]: failed["exit_code"] for failed in agent.get("failures", [])}
    silent = [rank for rank in range(nproc) if rank not in ended]
    rank = next((rank for rank in silent if rank in codes), silent[0] if silent else 0)
    how = f"exited with code {codes[rank]}" if rank in codes else "ended"
    begun = "without a word" if rank in reports else "before it had begun; its own output is above"
    return Verdict(1, "failed", f"rank {rank} {how} {begun}", rank, "RankLost")
