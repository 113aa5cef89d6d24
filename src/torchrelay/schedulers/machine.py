"""Machine: whose a run is, on which machine, and where its sockets and pages are: for whoever acts on its processes."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from msgspec import Struct

from torchrelay.schedulers.local import read_file, write_file

RECORD = "machine.json"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Machine(Struct, frozen=True, kw_only=True):
    """`RUN_DIR/machine.json`, written by `torchrelay run` when it starts."""

    boot: str  # the kernel's name for this boot of this machine
    host: str
    uid: int
    pid: int  # of `torchrelay run`
    folder: str  # sockets and pages


def write_machine(run_dir: Path, folder: Path) -> None:
    """Note where the run is."""
    write_file(
        run_dir / RECORD,
        Machine(boot=boot_id(), host=socket.gethostname(), uid=os.getuid(), pid=os.getpid(), folder=str(folder)),
    )


def read_machine(run_dir: Path) -> Machine | None:
    """Where it is; None if that was never noted. Raises `SchedulerError` if the file is damaged."""
    return read_file(run_dir / RECORD, Machine)


def boot_id() -> str:
    """Different on each machine, and after each boot."""
    return BOOT_ID.read_text().strip()
