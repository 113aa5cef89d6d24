"""Children: the forkserver's own record of its worker processes, and what the kernel says of them.

Ends are learnt with `waitid(WNOWAIT)`: until it is reaped, a dead worker still holds its process id and its group's,
so that what is left of its family can be killed without hitting a stranger. A set-uid program that became another user
is not ours to kill: it is named and left alone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torchrelay.agent.workers.forks import Child, Ended
from torchrelay.agent.workers.oom import OomCounters
from torchrelay.protocol.messages.ids import WorkerId
from torchrelay.wire.files.procfs import all_processes, children_of, read_proc

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
CANNOT_START = 94  # what a worker that could not be started has ended with
TELLING = frozenset({signal.SIGUSR1, signal.SIGUSR2})  # signals that are not meant to end a process


@dataclass
class Process:
    """A worker that has not been reaped yet."""

    child: Child
    ordered: dict[int, str] = field(default_factory=dict)  # signals we sent, and why
    delivered: set[int] = field(default_factory=set)  # signals of the launcher that it has had, by their number


class Children:
    """All workers of one forkserver, running or ended. Single-threaded."""

    def __init__(self, oom: OomCounters | None = None) -> None:
        self._running: dict[WorkerId, Process] = {}
        self._ended: dict[WorkerId, Ended] = {}
        self._oom = oom if oom is not None else OomCounters()
        self._spared: set[int] = set()  # processes of other users that were named

    def list_running(self) -> tuple[Child, ...]:
        return tuple(process.child for process in self._running.values())

    def list_ended(self) -> tuple[Ended, ...]:
        return tuple(self._ended.values())

    def find(self, worker: WorkerId) -> Child | Ended | None:
        """What is known of this worker."""
        process = self._running.get(worker)
        return process.child if process is not None else self._ended.get(worker)

    def add(self, child: Child) -> Child:
        self._running[child.worker] = Process(child)
        return child

    def fail(self, worker: WorkerId, slot: int, error: OSError) -> Ended:
        """It could not be started."""
        named = f"{error.strerror}: {error.filename}" if error.filename else error.strerror or str(error)
        ended = Ended(
            worker=worker,
            slot=slot,
            pid=None,
            code=CANNOT_START,
            cause=f"could not be started: {named}",
            at_ns=time.monotonic_ns(),
        )
        self._ended[worker] = ended
        return ended

    def forget(self, worker: WorkerId) -> None:
        self._ended.pop(worker, None)

    def kill(self, worker: WorkerId, number: int, reason: str) -> None:
        """Signal a worker, with SIGKILL its whole process group; nothing if it has ended."""
        process = self._running.get(worker)
        if process is None:
            return
        process.ordered.setdefault(number, reason)
        send_signal(process.child.pid, number)
        if number == signal.SIGKILL:
            send_group(process.child.pid, number)

    def deliver(self, worker: WorkerId, number: int, nth: int) -> None:
        """Pass a signal of the launcher on to a worker, once; nothing if it has ended.

        SIGUSR1 and SIGUSR2 tell a script something. One that does not listen for them would be ended by them.
        """
        process = self._running.get(worker)
        if process is None or nth in process.delivered:
            return
        process.delivered.add(nth)
        if number in TELLING and not heeds(process.child.pid, number):
            return
        process.ordered.setdefault(number, "passed on by the launcher")
        send_signal(process.child.pid, number)

    def collect(self) -> Iterator[Ended]:
        """Workers that have ended since the last call, with what was left of their families killed.

        Each is yielded before it is reaped: report it at once, then go on.
        """
        dead: set[int] = set()
        for process in list(self._running.values()):
            status = os.waitid(os.P_PID, process.child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if status is None:
                continue
            send_group(process.child.pid, signal.SIGKILL)
            dead.add(process.child.pid)
            yield self._end(process, status)
        if dead:
            self._tell_spared(kill_sessions(dead))
        self._reap()

    def _end(self, process: Process, status: os.waitid_result) -> Ended:
        by_signal = status.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
        ended = Ended(
            worker=process.child.worker,
            slot=process.child.slot,
            pid=process.child.pid,
            code=None if by_signal else status.si_status,
            signal=status.si_status if by_signal else None,
            cause=self._cause(process, status) if by_signal else f"exit code {status.si_status}",
            at_ns=time.monotonic_ns(),
        )
        del self._running[process.child.worker]
        self._ended[process.child.worker] = ended
        return ended

    def _cause(self, process: Process, status: os.waitid_result) -> str:
        name = signal_name(status.si_status)
        reason = process.ordered.get(status.si_status)
        if reason is None and status.si_status == signal.SIGKILL:
            rose = self._oom.rose()
            reason = f"out of memory: {rose}" if rose else None
        if reason is None and status.si_code == os.CLD_DUMPED:
            reason = "core dumped"
        return f"{name} ({reason})" if reason else name

    def _reap(self) -> None:
        """Reap whoever is dead and not a worker that counts as running: ended workers, and what they left to us."""
        running = {process.child.pid for process in self._running.values()}
        while True:
            try:
                status = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            except ChildProcessError:
                return
            if status is None or status.si_pid in running:
                return  # a worker that ended just now is for the next `collect`
            os.waitpid(status.si_pid, 0)

    def end_all(self, deadline_s: float = 10.0, keep: int = 0) -> None:
        """Kill and reap every descendant but `keep`, workers or not, so that nothing is left running."""
        for process in self._running.values():
            send_group(process.child.pid, signal.SIGKILL)
        self._running.clear()
        deadline = time.monotonic() + deadline_s
        while time.monotonic() < deadline:
            left = set(children_of(os.getpid())) - {keep}
            if keep and not left:
                return
            spared = {pid for pid in left if not send_signal(pid, signal.SIGKILL)}
            self._tell_spared(spared)
            if left and left == spared:
                return
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            time.sleep(0.002)  # SIGKILL takes a moment; grandchildren become ours when their parents are gone

    def _tell_spared(self, spared: Iterable[int]) -> None:
        """Name these processes, once each."""
        for pid in set(spared) - self._spared:
            self._spared.add(pid)
            name = (read_proc(f"/proc/{pid}/comm") or "?").strip()
            text = f"process {pid} ({name}) runs as another user and cannot be ended: it is left running"
            try:
                print(f"forkserver {os.getpid()}: {text}", file=sys.stderr, flush=True)
            except OSError:
                pass  # the disk is full


# ---------------------------------------------------------------- the kernel


def prctl(option: int, value: int) -> None:
    """Call prctl(2). Raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def send_signal(pid: int, number: int) -> bool:
    """False if it is not ours to signal: a set-uid program that runs as another user."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it has ended
    except PermissionError:
        return False
    return True


def send_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        pass  # it has ended, or a set-uid program is left in it that is not ours to kill


def heeds(pid: int, number: int) -> bool:
    """Whether a process has a handler for this signal, or ignores it."""
    text = read_proc(f"/proc/{pid}/status") or ""
    masks = [int(line.split()[1], 16) for line in text.splitlines() if line.startswith(("SigCgt:", "SigIgn:"))]
    return any(mask >> (number - 1) & 1 for mask in masks)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def kill_sessions(sessions: Iterable[int]) -> list[int]:
    """Kill what is left of these sessions: children that made process groups of their own. Returns who is not ours."""
    wanted = set(sessions)
    family = [pid for pid, stat in all_processes() if stat.session in wanted and pid not in wanted]
    return [pid for pid in family if not send_signal(pid, signal.SIGKILL)]
