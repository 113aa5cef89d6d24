"""The test's side of the keeper: the process, and what is asked of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

from tests.support.machines import keeper
from tests.support.machines.init import DONE
from tests.support.machines.machine import Power, kill
from tests.support.machines.plan import REPOSITORY, Plan
from tests.support.machines.waiting import MachineError, wait_readable
from tests.support.patience import longer


class Keeper:
    """The process that has the switches' network namespace, and all inits for children."""

    def __init__(self) -> None:
        """Start it. Raises `MachineError` if it does not come up."""
        self.asked, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = ":".join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
        command = [sys.executable, "-m", keeper.__name__, str(theirs.fileno())]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            cwd="/",
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        try:
            if self._hear("start of the keeper")[0] != keeper.READY:
                raise MachineError("the keeper ended while it was started")
        except BaseException:
            self.close([])
            raise

    @property
    def pid(self) -> int:
        return self.process.pid

    def _hear(self, what: str) -> tuple[bytes, list[int]]:
        wait_readable(self.asked.fileno(), what)
        words, fds, _, _ = socket.recv_fds(self.asked, 4096, 2)
        return words, fds

    def start_init(self, plan: Plan) -> Power:
        """A machine as planned, without network as yet. Raises `MachineError` with what stood in its way."""
        self.asked.send(json.dumps(plan.to_json()).encode())
        words, fds = self._hear(f"start of {plan.name}")
        if len(fds) != 2:
            raise MachineError(f"the keeper ended while {plan.name} was started")
        power = Power(int(words), fds[1], socket.socket(fileno=fds[0]))
        try:
            wait_readable(fds[0], f"root of {plan.name}")
            if (said := power.control.recv(4096)) != DONE:
                raise MachineError(said.decode() or f"{plan.name} ended while it was started")
        except BaseException:
            kill(power.pidfd)
            power.close()
            raise
        return power

    def close(self, machines: list[Power]) -> None:
        """End these machines, then the keeper: it reaps their inits."""
        try:
            for power in machines:
                kill(power.pidfd)
            for power in machines:
                wait_readable(power.pidfd, "end of a machine")
        finally:
            self.asked.close()  # at which it ends what there may still be, and itself
            try:
                self.process.wait(longer(30))
            except BaseException:
                os.kill(self.pid, signal.SIGKILL)
                self.process.wait()
                raise
            for power in machines:
                power.close()
