"""Machines, that can be cut off, frozen, and lose their power.

with Machines(4) as machines:
    machines["m1"].run(["hostname"])
    machines["m2"].cut_power()
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from tests.support.machines.switch import Switch
from torchrelay.schedulers.tether import tethered

REPOSITORY = Path(__file__).parents[3]
INIT = Path(__file__).parent / "init.py"
DEADLINE_S = 20.0
NEW = ("unshare", "-m", "-u", "-i", "-n", "-p", "-f", "--kill-child")
TOOLS = ("ip", "unshare", "nsenter", "mount")


def obstacle() -> str:
    """Why this machine cannot pretend others; empty if it can."""
    if os.geteuid() != 0:
        return "namespaces of one's own need root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"{', '.join(missing)} not installed" if missing else ""


def until(what: str, *, deadline_s: float = DEADLINE_S) -> Iterator[None]:
    """Yields until the caller has seen a fact. Raises `TimeoutError`."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        yield
        time.sleep(0.01)
    raise TimeoutError(what)


class Machine:
    """One machine: its power, its link, its files, and what runs on it."""

    def __init__(self, name: str, address: str, switch: Switch, settings: Mapping[str, object]) -> None:
        self.name = name
        self.address = address
        self._switch = switch
        self._settings = json.dumps({"name": name, **settings})
        self._shell: subprocess.Popen[str] | None = None
        self.pid = 0  # of its process 1, as it is called outside
        self._namespace = ""
        self._started: list[subprocess.Popen[str]] = []

    @property
    def root(self) -> Path:
        """Its file system, seen from outside."""
        return Path(f"/proc/{self.pid}/root")

    def path(self, inside: str) -> Path:
        return self.root / inside.lstrip("/")

    # ------------------------------------------------------------ power

    def power_on(self) -> None:
        """A fresh machine of this name. Raises `TimeoutError`, OSError."""
        assert self._shell is None, f"{self.name} is on"
        self._shell = subprocess.Popen(
            [
                "unshare",
                "-m",
                "-u",
                "-i",
                "-n",
                "-p",
                "-f",
                "--kill-child",
                sys.executable,
                "-S",
                str(INIT),
                self._settings,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=tethered(signal.SIGKILL),
            start_new_session=True,
        )
        assert self._shell.stdout is not None
        said = self._shell.stdout.readline()
        if said != "ready\n":
            raise OSError(f"{self.name} does not start: {said}{self._shell.stdout.read()}")
        self.pid = int(Path(f"/proc/{self._shell.pid}/task/{self._shell.pid}/children").read_text().split()[0])
        self._namespace = os.readlink(f"/proc/{self.pid}/ns/pid")
        self._switch.plug(self.name, self.pid, self.address)

    def cut_power(self) -> None:
        """All its processes are gone at once, and nobody hears of it: first its link goes."""
        if self._shell is None:
            return
        with suppress(OSError):
            self._switch.cut(self.name)
        os.kill(self.pid, signal.SIGKILL)
        self._shell.wait()
        for process in self._started:  # one that is frozen with its child does not see its end
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
            process.wait()
        self._started.clear()
        assert self._shell.stdout is not None
        self._shell.stdout.close()
        for _ in until(f"{self.name} has processes still"):
            if not self.processes():
                break
        self._switch.unplug(self.name)
        self._shell, self.pid = None, 0

    def freeze(self) -> None:
        """Every process stops where it is."""
        stopped: set[int] = set()
        while new := set(self.processes()) - stopped:
            for pid in new:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            stopped |= new

    def thaw(self) -> None:
        outside = [process.pid for process in self._started if process.poll() is None]  # they stop with their children
        for pid in [*self.processes(), *outside]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    # ------------------------------------------------------------ link

    def cut_link(self, *, carrier: bool = True) -> None:
        self._switch.cut(self.name, carrier=carrier)

    def mend_link(self) -> None:
        self._switch.mend(self.name)

    # ------------------------------------------------------------ processes

    def processes(self) -> list[int]:
        """Process ids, as they are called outside."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with suppress(OSError):
                    if os.readlink(entry / "ns" / "pid") == self._namespace:
                        found.append(int(entry.name))
        return found

    def command(self, words: Sequence[str]) -> list[str]:
        """What runs `words` in here, in the repository."""
        return ["nsenter", "-t", str(self.pid), "-m", "-u", "-i", "-n", "-p", f"--wd={REPOSITORY}", "--", *words]

    def popen(
        self, words: Sequence[str], env: Mapping[str, str] | None = None, stdout: IO[str] | int | None = None
    ) -> subprocess.Popen[str]:
        """Start it. It ends when the test ends, or the machine."""
        process = subprocess.Popen(
            self.command(words),
            env=environment(env),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=tethered(signal.SIGKILL),
        )
        self._started.append(process)
        return process

    def signal(self, process: subprocess.Popen[str], number: int) -> None:
        """To what `popen` has started: the process itself is nsenter's child."""
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        for _ in until(f"{process.args!r} does not start"):
            if found := children.read_text().split():
                os.kill(int(found[0]), number)
                return

    def run(
        self, words: Sequence[str], env: Mapping[str, str] | None = None, timeout_s: float = DEADLINE_S
    ) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        return subprocess.run(
            self.command(words), env=environment(env), capture_output=True, text=True, timeout=timeout_s, check=False
        )


def environment(further: Mapping[str, str] | None) -> dict[str, str]:
    """Of what runs in a machine: what is installed, and nothing of this test's own places."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "PYTHONPATH", "LANG")}
    return {**kept, "HOME": "/root", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", **(further or {})}


class Machines:
    """`count` machines m1, m2, ... on one switch. `shared`: places in all of them that are one folder outside."""

    def __init__(self, count: int, shared: Mapping[str, Path] | None = None) -> None:
        self._count = count
        self._shared = {place: str(folder) for place, folder in (shared or {}).items()}
        self._machines: dict[str, Machine] = {}
        self._switch: Switch | None = None

    def __enter__(self) -> Machines:
        with ExitStack() as stack:
            self._switch = Switch()
            stack.callback(self.close)
            names = {f"m{number}": f"10.77.0.{number}" for number in range(1, self._count + 1)}
            hosts = "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in names.items())
            visible = sorted({str(REPOSITORY), sys.prefix, sys.base_prefix, *paths()})
            settings = {"hosts": hosts, "shared": self._shared, "visible": visible}
            for name, address in names.items():
                self._machines[name] = Machine(name, address, self._switch, settings)
                self._machines[name].power_on()
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> Machine:
        return self._machines[name]

    def __iter__(self) -> Iterator[Machine]:
        return iter(self._machines.values())

    def partition(self, *groups: Sequence[str]) -> None:
        """Machines of one group reach one another and no others."""
        assert self._switch is not None
        self._switch.split(*groups)

    def heal(self) -> None:
        assert self._switch is not None
        self._switch.split(tuple(self._machines))

    def close(self) -> None:
        for machine in self._machines.values():
            machine.cut_power()
        if self._switch is not None:
            self._switch.close()
            self._switch = None


def paths() -> list[str]:
    """Where modules are found that are installed nowhere."""
    return [str(Path(part).resolve()) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
