"""Processes of a system, wherever they hang in the tree, by a mark in their environment: CPU time, and the end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def stat_of(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on; None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None


def is_alive(pid: int) -> bool:
    found = stat_of(pid)
    return found is not None and found[0] not in "ZX"


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped it."""
    found = stat_of(pid)
    return found is not None and found[0] == "T"


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, without its children."""
    found = stat_of(pid)
    return 0.0 if found is None else (int(found[11]) + int(found[12])) * TICK_S


def all_of(name: str, value: str) -> list[int]:
    """The live processes of this user that have this variable in their environment."""
    wanted, found = f"{name}={value}".encode(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                variables = (folder / "environ").read_bytes().split(b"\0")
            except OSError:  # it has ended, or is somebody else's
                continue
            if wanted in variables and is_alive(int(folder.name)):
                found.append(int(folder.name))
    return found


def send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it has ended meanwhile


def kill_all(children: Sequence[subprocess.Popen[bytes]], find: Callable[[], list[int]], wait_s: float = 10) -> None:
    """End what is left: first by SIGTERM to those that we have started, in order; then all that `find` finds."""
    for child in children:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
    until = time.monotonic() + wait_s
    for child in children:
        try:
            child.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    until = time.monotonic() + wait_s
    while (left := find()) and time.monotonic() < until:
        for pid in left:
            send(pid, signal.SIGKILL)
        time.sleep(0.1)
