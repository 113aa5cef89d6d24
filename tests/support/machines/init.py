"""Init: process 1 of a pretended machine. Runs alone, without anything of ours: `init.py SETTINGS` in new namespaces.

It makes the machine's file system: what is installed is there, read-only, and what is written is this machine's alone.
Then it says `ready`, and only waits for orphans. When it ends, the kernel ends every process of the machine.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

OWN = ("/run", "/tmp", "/var/tmp", "/dev/shm", "/root", "/home", "/mnt")


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def mounted() -> list[str]:
    """Where something is mounted, in order."""
    return [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]


def hidden(path: str) -> bool:
    return any(path == own or path.startswith(f"{own}/") for own in OWN)


def make_files(visible: list[str], shared: dict[str, str], hosts: str) -> None:
    """`visible` stays where it is, read-only; `shared` maps a place in here to a folder outside."""
    for place in mounted():
        if not place.startswith(("/proc", "/sys", "/dev")):
            subprocess.run(["mount", "-o", "remount,bind,ro", place], check=False, stderr=subprocess.DEVNULL)
    staged = "/run"
    kept = {path: f"{staged}/kept-{number}" for number, path in enumerate(visible) if hidden(path)}
    lent = {place: f"{staged}/lent-{number}" for number, place in enumerate(shared)}
    descriptors = {path: os.open(path, os.O_PATH) for path in [*kept, *shared.values()]}
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", staged)
    for path, stage in kept.items():
        bind(descriptors[path], stage)
        mount("-o", "remount,bind,ro", stage)
    for place, stage in lent.items():
        bind(descriptors[shared[place]], stage)
        mount("-o", "remount,bind,rw", stage)
    for own in OWN:
        if own != staged and os.path.isdir(own):
            mode = "1777" if own in ("/tmp", "/var/tmp", "/dev/shm") else "700" if own == "/root" else "755"
            mount("-t", "tmpfs", "-o", f"mode={mode}", "tmpfs", own)
    for path, stage in {**kept, **lent}.items():
        os.makedirs(path, exist_ok=True)
        mount("--bind", stage, path)
    Path("/run/hosts").write_text(hosts)
    mount("--bind", "/run/hosts", "/etc/hosts")
    mount("-t", "proc", "proc", "/proc")


def bind(descriptor: int, stage: str) -> None:
    """A folder that was open before it was hidden. (Our number in /proc is that outside, until it is mounted anew.)"""
    os.makedirs(stage, exist_ok=True)
    outside = os.readlink("/proc/self")
    mount("--bind", f"/proc/{outside}/fd/{descriptor}", stage)


def main() -> None:
    settings = json.loads(sys.argv[1])
    socket.sethostname(settings["name"])
    make_files(settings["visible"], settings["shared"], settings["hosts"])
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    print("ready", flush=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            signal.sigtimedwait({signal.SIGCHLD}, 0.2)


if __name__ == "__main__":
    main()
