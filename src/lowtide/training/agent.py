"""torch's own launcher, ``torch.distributed.run``, as a child that reports to ours and keeps quiet.

Run as ``python -m lowtide.training.agent LAUNCHER_PID <arguments of torch.distributed.run>``. It is ``python
-m torch.distributed.run`` with two additions: it dies with our launcher (and its ranks with it), and how the
ranks ended is written to a file, where torch prints a page of tracebacks after ours has already said what was
wrong. Checked with torch 2.11, 2.13 and 2.14: ``ChildFailedError.failures`` holds the ranks in the order in
which they were found dead, those that the agent itself ended last.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from lowtide.system.files import write_json
from lowtide.system.processes import die_with_parent
from lowtide.training.rank_status import LAUNCH_DIR

__all__ = ["REPORT", "main"]

REPORT = "agent.json"


def main(argv: list[str]) -> int:
    """Run the agent; 0 when every rank returned 0."""
    die_with_parent(int(argv[0]))
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # What it logs, our launcher says in one sentence.
    logging.disable(logging.CRITICAL)
    try:
        run.main(argv[1:])
    except ChildFailedError as error:
        failures = [
            {"rank": int(rank), "exit_code": int(failed.exitcode), "pid": int(failed.pid), "at": failed.timestamp}
            for rank, failed in error.failures.items()
        ]
        return _report(failures=failures)
    except (SignalException, KeyboardInterrupt) as error:
        return _report(failures=[], stopped=str(error) or type(error).__name__)
    except BaseException as error:
        return _report(failures=[], broken="".join(traceback.format_exception(error)))
    return 0


def _report(**fields: Any) -> int:
    write_json(Path(os.environ[LAUNCH_DIR], REPORT), fields)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
