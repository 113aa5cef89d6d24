"""Out of memory: the kernel says who it was, but not in the exit status. Its counters tell.

A process that the kernel kills for memory ends by SIGKILL like any other. The kernel raises a counter just before: in
the memory cgroup of the process, and one for the whole machine.
"""

from __future__ import annotations

from pathlib import Path


class OomCounters:
    """Watches the two counters of this process's cgroup and machine, from the moment it is made."""

    def __init__(self, cgroup_file: Path | None = None, vmstat: Path = Path("/proc/vmstat")) -> None:
        self._cgroup_file = cgroup_file if cgroup_file is not None else own_cgroup_file()
        self._vmstat = vmstat
        self._before = self._read()

    def rose(self) -> str | None:
        """What has risen since the last call, in words; None if the kernel has killed nothing for memory.

        A counter says that a process was killed, not which: with several SIGKILLs at once the first asker gets it.
        """
        before, self._before = self._before, self._read()
        for name, then, now in zip(("cgroup oom_kill", "the kernel's oom_kill"), before, self._before, strict=True):
            if now > then:
                return f"{name} rose from {then} to {now}"
        return None

    def _read(self) -> tuple[int, int]:
        return count_in(self._cgroup_file), count_in(self._vmstat)


def count_in(path: Path | None) -> int:
    """The value of the `oom_kill` line; 0 if there is no such file or line (an old kernel, a closed container)."""
    if path is None:
        return 0
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.strip().isdigit():
            return int(value)
    return 0


def own_cgroup_file(cgroup: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Path | None:
    """Where the counter of this process's memory cgroup is: version 2's `memory.events`, or version 1's file."""
    try:
        lines = cgroup.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            candidates = [root / path.lstrip("/") / "memory.events"]
        elif "memory" in controllers.split(","):
            candidates = [root / "memory" / path.lstrip("/") / "memory.oom_control"]
        else:
            continue
        # In a container the path is the host's, while the mount shows this container's group as its root.
        base = root if controllers == "" else root / "memory"
        candidates.append(base / candidates[0].name)
        for file in candidates:
            if file.exists():
                return file
    return None
