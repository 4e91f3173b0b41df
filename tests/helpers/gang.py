"""A pool of worker processes for tests that need several ranks.

Why: starting an interpreter and importing torch takes seconds, a fork takes milliseconds; but a fork after a
multi-threaded backward hangs. So one *nursery* process is forked after collection, before any test has run
a tensor operation. It never runs one itself and forks workers whenever they are asked for, also when a worker
died or hung hours later. Workers keep what they have imported and run many calls, one after the other.

Every call gets a fresh FileStore and a fresh gloo group, which is destroyed afterwards; a call that failed in
any way costs its workers their lives, since a rank that raised may have left the others inside a collective.
Workers end when their connection closes, and the kernel ends them with the nursery, and that with pytest.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_KEY = b"lowtide-tests"
MAX_RANKS = 4
_DIED = "the process died without an answer"


class RankFailedError(AssertionError):
    """A rank died or did not answer in time; what it raised itself is raised as it was."""


@dataclass
class _Call:
    rank: int
    world_size: int
    store: str
    group: bool
    port: int
    timeout_s: float
    preload: tuple[str, ...]
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Gang:
    """Runs functions on several ranks; see the module's docstring."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="lowtide-gang-")
        self._calls = 0
        self._workers: list[_Worker] = []
        self._listener = Listener(str(Path(self._folder.name, "pool")), authkey=_KEY)
        read_end, self._orders = os.pipe()
        self._nursery = os.fork()
        if self._nursery == 0:
            os.close(self._orders)
            _nursery_main(read_end, str(self._listener.address), self._folder.name)
        os.close(read_end)

    def run_on(
        self,
        n: int,
        fn: Callable[..., Any],
        *args: Any,
        timeout_s: float = 90,
        group: bool = True,
        preload: tuple[str, ...] = (),
        **kwargs: Any,
    ) -> list[Any]:
        """Run ``fn(*args, **kwargs)`` on ``n`` ranks and return the results by rank.

        ``fn`` is a module-level function, its arguments and result can be pickled. It runs in an initialised
        gloo group, or, with ``group=False``, only with the environment that torchrun would set. ``preload``
        names modules to import before the group is made, so that slow imports cost no timeout. What a rank
        raises is raised here, with the rank and its traceback as a note.
        """
        assert 1 <= n <= MAX_RANKS, f"the pool has {MAX_RANKS} workers at most, asked for {n}"
        self._calls += 1
        workers = self._take(n)
        port = _free_port()
        for rank, worker in enumerate(workers):
            store = str(Path(self._folder.name, f"store-{self._calls}"))
            worker.send(_Call(rank, n, store, group, port, timeout_s, preload, fn, args, kwargs))
        answers, problems = self._collect(workers, timeout_s)
        if problems or any(not ok for ok, _ in answers.values()):
            for worker in workers:
                self._discard(worker)
        _raise_first(answers, problems)
        return [answers[rank][1] for rank in range(n)]

    def pids(self) -> list[int]:
        """Return the process ids of the workers that are alive."""
        return [w.pid for w in self._workers]

    def close(self) -> None:
        """End every process of the pool."""
        for worker in list(self._workers):
            self._discard(worker)
        os.close(self._orders)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._nursery, 0)
        self._listener.close()
        self._folder.cleanup()

    def _take(self, n: int) -> list[_Worker]:
        for worker in [w for w in self._workers if not w.alive()]:
            self._discard(worker)
        missing = n - len(self._workers)
        if missing > 0:
            os.write(self._orders, b"f" * missing)
            for _ in range(missing):
                self._workers.append(_Worker(self._listener.accept(), self._folder.name))
        return self._workers[:n]

    def _collect(self, workers: list[_Worker], timeout_s: float) -> tuple[dict[int, tuple[bool, Any]], dict[int, str]]:
        answers: dict[int, tuple[bool, Any]] = {}
        problems: dict[int, str] = {}
        waiting = {w.connection: rank for rank, w in enumerate(workers)}
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank in waiting.values():
                    problems[rank] = f"no answer after {timeout_s} s\n{workers[rank].stacks()}"
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    problems[rank] = _DIED
            if problems or any(not ok for ok, _ in answers.values()):
                # The others may wait in a collective for the rank that is gone: give them a moment, no more.
                deadline = min(deadline, time.monotonic() + 2)
        return answers, problems

    def _discard(self, worker: _Worker) -> None:
        worker.kill()
        if worker in self._workers:
            self._workers.remove(worker)


def _raise_first(answers: dict[int, tuple[bool, Any]], problems: dict[int, str]) -> None:
    """Raise the cause: a rank that died, else what was raised first, else that a rank was silent."""
    raised = sorted(
        ((value[2], rank, value[0], value[1]) for rank, (ok, value) in answers.items() if not ok),
        key=lambda r: r[:2],
    )
    told = "".join(f"\n  rank {rank}: {text}" for rank, text in sorted(problems.items()))
    if raised and _DIED not in told:
        _, rank, error, text = raised[0]
        error.add_note(f"raised on rank {rank}; its own traceback:\n{text}{told}")
        raise error
    if problems:
        told += "".join(f"\n  rank {rank}: {text}" for _, rank, _, text in raised)
        raise RankFailedError(f"a rank failed:{told}")


class _Worker:
    def __init__(self, connection: Connection, folder: str) -> None:
        self.connection = connection
        self.pid: int = connection.recv()
        self._stacks = Path(folder, f"stacks-{self.pid}")

    def send(self, call: _Call) -> None:
        self.connection.send_bytes(pickle.dumps(call))

    def alive(self) -> bool:
        # A worker that waits for a call has sent nothing: a readable connection is a closed one.
        return not self.connection.poll()

    def stacks(self) -> str:
        """Return the Python stacks of a worker that hangs."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(0.3)
        return self._stacks.read_text() if self._stacks.exists() else ""

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.connection.close()


def _die_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _nursery_main(orders: int, address: str, folder: str) -> None:
    """Fork one worker for every byte that is read; end when the pipe closes."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        while os.read(orders, 1):
            if os.fork() == 0:
                os.close(orders)
                _worker_main(address, folder)
    finally:
        os._exit(0)


def _worker_main(address: str, folder: str) -> None:
    status = 1
    try:
        _die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with Path(folder, f"stacks-{os.getpid()}").open("w") as stacks:
            faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
            connection = Client(address, authkey=_KEY)
            connection.send(os.getpid())
            _serve(connection)
        status = 0
    except (EOFError, OSError):
        status = 0
    finally:
        # Never through pytest's own exit handlers, which belong to the parent.
        os._exit(status)


def _serve(connection: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        ok, value = False, None
        raw = connection.recv_bytes()
        try:
            call: _Call = pickle.loads(raw)
            ok, value = True, _run(call)
        except BaseException as error:  # it is the parent's to judge
            value = (error, traceback.format_exc(), getattr(error, "raised_at", time.monotonic()))
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(_pickled(ok, value))


def _pickled(ok: bool, value: Any) -> bytes:
    try:
        answer = pickle.dumps((ok, value))
        pickle.loads(answer)
    except Exception as error:
        if ok:
            text = f"the result cannot be pickled: {error!r}"
        else:
            text = f"{type(value[0]).__name__}: {value[0]}\n{value[1]}"
        raised_at = time.monotonic() if ok else value[2]
        return pickle.dumps((False, (RankFailedError(text), text, raised_at)))
    return answer


def _run(call: _Call) -> Any:
    import torch

    for name in call.preload:
        __import__(name)
    random.seed(0)
    torch.manual_seed(0)
    with _environment(call):
        if not call.group:
            return _called(call)
        with _group(call):
            return _called(call)


def _called(call: _Call) -> Any:
    try:
        return call.fn(*call.args, **call.kwargs)
    except BaseException as error:
        # Leaving the group makes the other ranks fail too: the first to raise is the cause.
        with contextlib.suppress(AttributeError):
            error.raised_at = time.monotonic()  # type: ignore[attr-defined]
        raise


@contextlib.contextmanager
def _environment(call: _Call) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(
        RANK=str(call.rank),
        LOCAL_RANK=str(call.rank),
        WORLD_SIZE=str(call.world_size),
        LOCAL_WORLD_SIZE=str(call.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(call.port),
        OMP_NUM_THREADS="1",
    )
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _group(call: _Call) -> Iterator[None]:
    import torch.distributed as dist

    store = dist.FileStore(call.store, call.world_size)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=call.rank,
        world_size=call.world_size,
        timeout=datetime.timedelta(seconds=call.timeout_s),
    )
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
