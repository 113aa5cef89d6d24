"""Commands in a mount namespace of their own, where a folder is a small file system in memory. For root only."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest

MOUNT = 'mount -t tmpfs -o "size=$1,mode=$2" tmpfs "$3" && shift 3 && exec "$@"'


def may_mount() -> bool:
    """Whether this user may make such a namespace here."""
    if shutil.which("unshare") is None:
        return False
    words = within(Path("/dev/shm"), "1m", ["true"])
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def within(folder: Path, size: str, command: list[str], mode: str = "1777") -> list[str]:
    """The command line that runs `command` where `folder` is a tmpfs of this size. The process id stays its own."""
    return [
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "sh",
        "-c",
        MOUNT,
        "sh",
        size,
        mode,
        str(folder),
        *command,
    ]


def seen_by(pid: int, folder: Path) -> Path:
    """This folder as that process sees it."""
    return Path(f"/proc/{pid}/root") / folder.relative_to("/")


@contextmanager
def kept_full(folder: Path) -> Iterator[None]:
    """Whatever room there is in this folder, or comes to be, is taken at once; afterwards it is free again."""
    stop, full = Event(), Event()

    # All in one call: a worker whose page is to be made this moment must not find the room that another one has left.
    block = bytes(16 << 20)

    def fill() -> None:
        with (folder / "filler").open("wb", buffering=0) as file:
            while not stop.is_set():
                try:
                    file.write(block)
                except OSError:
                    full.set()
                    stop.wait(0.0002)

    thread = Thread(target=fill)
    thread.start()
    try:
        assert full.wait(60), f"{folder} was not filled"
        yield
    finally:
        stop.set()
        thread.join()
        (folder / "filler").unlink(missing_ok=True)  # its namespace may be gone


needs_mounts = pytest.mark.skipif(not may_mount(), reason="mounts in a namespace of one's own are not permitted here")
