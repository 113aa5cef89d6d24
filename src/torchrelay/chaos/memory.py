"""Memory: a real out-of-memory kill of one process, by a memory cgroup of its own that has no room (root only)."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from torchrelay.agent.workers.oom import own_cgroup_file
from torchrelay.chaos.faults import Fault, Gone, Victim, strike

# What the process may have on top of what it has: its next allocations go beyond it.
ROOM = 1 << 20
WITHIN_S = 20.0
LOOK_S = 0.01
LIMITS = ("memory.max", "memory.limit_in_bytes")  # of cgroup version 2, and of version 1


@dataclass(frozen=True, slots=True)
class Cramped:
    """A memory cgroup that holds next to nothing."""

    folder: Path

    @classmethod
    def of(cls, pid: int) -> Cramped:
        """Make one below the group of this process. Raises OSError where that is not possible."""
        counter = own_cgroup_file(Path(f"/proc/{pid}/cgroup"))
        if counter is None:
            raise FileNotFoundError(f"no memory cgroup of process {pid} to be found")
        folder = counter.parent / f"torchrelay-chaos-{pid}"
        folder.mkdir()
        made = cls(folder)
        try:
            limit = next((folder / name for name in LIMITS if (folder / name).exists()), None)
            if limit is None:
                raise FileNotFoundError(f"{folder} has no memory limit: the controller is not delegated")
            limit.write_text(str(ROOM))
        except OSError:
            made.remove()
            raise
        return made

    def take(self, pid: int) -> None:
        (self.folder / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        """Remove it, when the kernel has let go of its last process."""
        until = time.monotonic() + 2.0
        while self.folder.exists() and time.monotonic() < until:
            try:
                os.rmdir(self.folder)
            except OSError:
                time.sleep(LOOK_S)


def possible(pid: int) -> bool:
    """Whether the kernel can be brought to it here."""
    try:
        Cramped.of(pid).remove()
    except OSError:
        return False
    return True


def starve(victim: Victim, within_s: float = WITHIN_S) -> str:
    """Let the kernel kill it for memory. Says what happened: a process that asks for no more memory is killed by us."""
    group = Cramped.of(victim.pid)
    try:
        group.take(victim.pid)
        until = time.monotonic() + within_s
        while lives(victim):
            if time.monotonic() >= until:
                strike(victim, Fault.KILL)
                return f"it asked for no memory for {within_s:g} s: SIGKILL instead"
            time.sleep(LOOK_S)
    except (Gone, ProcessLookupError):
        pass
    finally:
        group.remove()
    return "the kernel killed it for memory"


def lives(victim: Victim) -> bool:
    try:
        return Path(f"/proc/{victim.pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
