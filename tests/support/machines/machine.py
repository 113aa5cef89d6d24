"""A machine: a name, an address, files of its own, and power that can go."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.machines.init import CONTINUE_ALL, DONE, STOP_ALL
from tests.support.machines.kernel import in_network_of
from tests.support.machines.process import Process, Stream
from tests.support.machines.switch import Port
from tests.support.machines.waiting import DEADLINE_S, MachineError, wait_for, wait_readable
from torchrelay.schedulers.network import ip

if TYPE_CHECKING:
    from tests.support.machines.harness import Machines

HOME = "/root"
# Of the test's environment, what names places that a machine has not.
DROPPED = ("TMPDIR", "TEMP", "TMP", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "SSH_AUTH_SOCK")
RUNNING = "RS"  # states of threads that are not stopped: running, or waiting for something that would wake them


@dataclass
class Power:
    """What there is of a machine only while it has power."""

    pid: int  # of its init, as the test sees it
    pidfd: int
    control: socket.socket
    frozen: bool = False
    processes: list[Process] = field(default_factory=list)  # whose end was not heard as yet

    def close(self) -> None:
        """Once its init has ended: all processes have too, which is told to those who hold them."""
        os.close(self.pidfd)
        self.control.close()
        for process in self.processes:
            process.wait(DEADLINE_S)


@dataclass(eq=False)
class Machine:
    """One of the harness's machines. Its name is its host name."""

    name: str
    addresses: tuple[str, ...]  # one for each link
    ports: tuple[Port, ...]
    harness: Machines = field(repr=False)
    power: Power | None = field(default=None, repr=False)

    # ------------------------------------------------------------ what it is

    @property
    def address(self) -> str:
        """The address on its first link."""
        return self.addresses[0]

    @property
    def is_on(self) -> bool:
        return self.power is not None

    @property
    def pid(self) -> int:
        """Of its init, as the test sees it. Raises `MachineError` without power."""
        return self._on().pid

    @property
    def root(self) -> Path:
        """Its root, for the test to read and write its files. Raises `MachineError` without power."""
        return Path(f"/proc/{self.pid}/root")

    def pids(self) -> list[int]:
        """All its processes but init, as it numbers them itself."""
        found = (int(path.name) for path in (self.root / "proc").iterdir() if path.name.isdigit())
        return sorted(pid for pid in found if pid != 1)

    def network(self) -> AbstractContextManager[None]:
        """While in it, this thread of the test is in the machine's network: for sockets, which then stay in it."""
        return in_network_of(self.pid)

    def socket(self) -> socket.socket:
        """A TCP socket of the test in the machine's network. A power cut does not close it."""
        with self.network():
            return socket.socket()

    def _on(self) -> Power:
        if self.power is None:
            raise MachineError(f"{self.name} has no power")
        return self.power

    # ------------------------------------------------------------ what runs on it

    def environment(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        """The test's, with what differs on the machine, and with `env` over it."""
        own = {name: value for name, value in os.environ.items() if name not in DROPPED}
        return {**own, "HOME": HOME, "PYTHONDONTWRITEBYTECODE": "1", **(env or {})}

    def popen(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = HOME,
        stdin: Stream = subprocess.DEVNULL,
        stdout: Stream = None,
        stderr: Stream = None,
    ) -> Process:
        """Start it, as a child of init and leader of a session. `env` comes to the environment there is anyway."""
        power = self._on()
        if power.frozen:
            raise MachineError(f"{self.name} is frozen: nothing starts there")
        env = self.environment(env)
        process = Process(power.control, command, env=env, cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr)
        power.processes = [*(one for one in power.processes if one.returncode is None), process]
        return process

    def run(
        self,
        command: Sequence[str],
        *,
        timeout: float = 30,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        cwd: str = HOME,
        words: str = "",
    ) -> subprocess.CompletedProcess[str]:
        """Run it to its end, with these words for its input. With `check`, raises `MachineError` if it fails."""
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            given.write(words.encode())
            given.seek(0)
            with self.popen(command, env=env, cwd=cwd, stdin=given, stdout=out, stderr=err) as process:
                code = process.wait(timeout)
            said = [read_all(out.fileno()), read_all(err.fileno())]
        if check and code != 0:
            raise MachineError(f"{' '.join(command)} on {self.name} ended with {code}: {said[1] or said[0]}")
        return subprocess.CompletedProcess(list(command), code, said[0], said[1])

    def start_sshd(self) -> Process:
        """A real sshd: any machine that has had one started may log in to it as root. Raises `MachineError`."""
        return self.harness.start_sshd(self)

    # ------------------------------------------------------------ links

    def cut_link(self, link: int | None = None, *, carrier: bool = True) -> None:
        """Nothing goes through any more, and nothing is said of it. Without carrier: the cable is pulled. All links,
        if none is named."""
        self.harness.switches.set(self._ports(link), cut=True, carrier=carrier)

    def mend_link(self, link: int | None = None) -> None:
        """As before."""
        self.harness.switches.set(self._ports(link), cut=False)

    def _ports(self, link: int | None) -> tuple[Port, ...]:
        return self.ports if link is None else (self.ports[link],)

    # ------------------------------------------------------------ power

    def cut_power(self) -> None:
        """Its links go first, so that the others hear nothing of it; then all its processes die at once."""
        power = self._on()
        self.harness.switches.unplug(self.ports)
        for port in self.ports:
            port.name = ""
        self.power = None
        try:
            kill(power.pidfd)
            # The kernel lets an init end only when all processes of its namespace are gone.
            wait_readable(power.pidfd, f"end of all processes of {self.name}")
        finally:
            power.close()

    def power_on(self) -> None:
        """Start it, with nothing of what it had before."""
        if self.power is not None:
            raise MachineError(f"{self.name} has power already")
        power = self.harness.keeper.start_init(self.harness.plan_of(self))
        try:
            for port, address in zip(self.ports, self.addresses, strict=True):
                self.harness.switches.plug(port, power.pid)
                lines = [f"addr add {address}/24 dev eth{port.link}", f"link set eth{port.link} up", "link set lo up"]
                with in_network_of(power.pid):
                    ip("-batch", "-", words="\n".join(lines))
        except BaseException:
            kill(power.pidfd)
            power.close()
            raise
        self.power = power

    def freeze(self) -> None:
        """All its processes stand still; links and sockets are as they were."""
        power = self._on()
        if power.frozen:
            return
        self._tell_init(STOP_ALL)
        signal.pidfd_send_signal(power.pidfd, signal.SIGSTOP)
        power.frozen = True
        wait_for(f"all processes of {self.name} stopped", self._is_still)

    def thaw(self) -> None:
        """They go on; so do those that a test had stopped before."""
        power = self._on()
        if power.frozen:
            signal.pidfd_send_signal(power.pidfd, signal.SIGCONT)
            self._tell_init(CONTINUE_ALL)
            power.frozen = False

    def _tell_init(self, word: bytes) -> None:
        power = self._on()
        power.control.send(word)
        wait_readable(power.control.fileno(), f"answer of the init of {self.name}")
        if power.control.recv(64) != DONE:
            raise MachineError(f"the init of {self.name} has ended")

    def _is_still(self) -> bool:
        """Each process has its stop signal by now, and so has one that is being forked: it may just not be listed yet.

        A thread in the midst of a system call ("D") will not come out of it.
        """
        states = self._thread_states()
        return not set(states.values()) & set(RUNNING) and self._thread_states() == states

    def _thread_states(self) -> dict[Path, str]:
        found = {}
        for path in (self.root / "proc").glob("[0-9]*/task/*/stat"):
            try:
                found[path] = path.read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue  # it has ended
        return found


def kill(pidfd: int) -> None:
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it ended before


def read_all(fd: int) -> str:
    """All of a file, as text, wherever its writer has left the position."""
    return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")
