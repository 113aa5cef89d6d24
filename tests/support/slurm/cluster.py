"""The cluster: a controller, its nodes, and what a test does with them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType

from tests.support.machines.harness import Machines
from tests.support.machines.machine import Machine
from tests.support.machines.process import Process, Stream
from tests.support.machines.waiting import MachineError, wait_for
from tests.support.slurm.conf import Site, slurm_conf
from tests.support.slurm.daemons import Daemons, new_key, put_files
from tests.support.slurm.inside import no_more_jobs
from tests.support.slurm.job import DEADLINE_S, Job, wait_in
from tests.support.slurm.users import USER, User, add_user

PORT = 6817  # of slurmctld
LISTENS = "0A"  # in /proc/net/tcp
ROOT = None  # as a user: the one who administers Slurm


class Slurm:
    """A Slurm across machines, all of whose nodes are idle at the start.

    `folder`: where the words of its daemons are kept. `nodes`: all but the controller, if none is named.
    """

    def __init__(
        self,
        machines: Machines,
        folder: Path,
        *,
        controller: str = "m1",
        nodes: Iterable[str] = (),
        site: Site | None = None,
    ) -> None:
        self.machines, self.folder = machines, folder
        self.controller = machines[controller]
        names = list(nodes) or [machine.name for machine in machines if machine is not self.controller]
        if controller in names:
            raise ValueError(f"{controller} controls: as a node, it could not lose its power alone")
        self.nodes = {name: machines[name] for name in names}
        self.site = site or Site()
        self.key = new_key()
        addresses = {name: machine.address for name, machine in self.nodes.items()}
        self.conf = slurm_conf((controller, self.controller.address), addresses, self.site)
        self.daemons: dict[str, Daemons] = {}

    # ------------------------------------------------------------ from start to end

    def __enter__(self) -> Slurm:
        """Raises `MachineError` if not all nodes are idle after a while."""
        try:
            self._prepare(self.controller, *self.nodes.values())
            self._start("slurmctld", self.controller)
            wait_for("slurmctld", self._listens)  # a slurmd that is not heard at first waits for a second
            for node in self.nodes.values():
                self._start("slurmd", node)
            self.wait_idle()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _prepare(self, *machines: Machine) -> None:
        """All that Slurm finds there when it starts."""
        for machine in machines:
            put_files(machine, self.key, self.conf, self.site)
            add_user(machine, USER)
            self.daemons[machine.name] = Daemons(machine, self.folder)
            self.daemons[machine.name].start_munged()
        for machine in machines:
            wait_for(f"munged on {machine.name}", self.daemons[machine.name].can_sign)

    def _start(self, name: str, machine: Machine) -> None:
        self.daemons[machine.name].start(name, "-D")

    def _listens(self) -> bool:
        sockets = (self.controller.root / "proc/1/net/tcp").read_text().splitlines()
        here = (line.split()[1:4:2] for line in sockets[1:])
        return self.daemons[self.controller.name].all_live() and [f"00000000:{PORT:04X}", LISTENS] in list(here)

    def close(self) -> None:
        """All daemons end, and whatever runs in jobs: no process is left of either. Raises `MachineError` otherwise."""
        all_of_them = *self.nodes.values(), self.controller
        lit = [machine for machine in all_of_them if machine.is_on and machine.name in self.daemons]
        for machine in lit:
            machine.thaw()
            self.daemons[machine.name].kill()
        for machine in lit:
            wait_for(f"end of all jobs on {machine.name}", partial(no_more_jobs, machine))

    # ------------------------------------------------------------ commands

    def run(
        self,
        *command: str,
        at: str = "",
        user: User | None = ROOT,
        words: str = "",
        check: bool = True,
        timeout: float = DEADLINE_S,
    ) -> subprocess.CompletedProcess[str]:
        """Run it on a machine, the controller if none is named. With `check`, raises `MachineError` if it fails."""
        machine = self.machines[at] if at else self.controller
        line, env, cwd = as_user(command, user)
        return machine.run(line, env=env, cwd=cwd, words=words, check=check, timeout=timeout)

    def popen(
        self,
        *command: str,
        at: str = "",
        user: User | None = ROOT,
        stdin: Stream = subprocess.DEVNULL,
        stdout: Stream = None,
        stderr: Stream = None,
    ) -> Process:
        """Start it on a machine, as `run` does."""
        machine = self.machines[at] if at else self.controller
        line, env, cwd = as_user(command, user)
        return machine.popen(line, env=env, cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr)

    def submit(
        self, script: str, *flags: str, user: User | None = ROOT, at: str = "", output: str = "/dev/null"
    ) -> Job:
        """A batch script, without its first line. Raises `MachineError` if Slurm refuses it."""
        words = ["sbatch", "--parsable", f"--output={output}", *flags]
        said = self.run(*words, user=user, at=at, words=f"#!/bin/sh\n{script}\n").stdout
        return Job(self, int(said.strip().partition(";")[0]))

    def jobs(self) -> list[str]:
        """All that are not over, as `<number> <state> <nodes>`."""
        return self.run("squeue", "-h", "-o", "%i %T %N").stdout.splitlines()

    # ------------------------------------------------------------ nodes

    def host_names(self, nodes: str) -> list[str]:
        """m[2-4] -> m2, m3, m4."""
        return self.run("scontrol", "show", "hostnames", nodes).stdout.split() if nodes else []

    def states(self) -> dict[str, str]:
        """Of all nodes, as "idle"; with "*" at the end if it does not answer. Empty if the controller does not."""
        said = self.run("sinfo", "-h", "-N", "-o", "%N %T", check=False).stdout
        return dict(line.split() for line in said.splitlines())

    def state(self, node: str) -> str:
        return self.states()[node]

    def wait_state(self, node: str, *states: str, deadline_s: float = DEADLINE_S) -> None:
        """Raises `MachineError` if it comes into none of them."""
        wait_in(node, lambda: self.state(node), states, deadline_s)

    def wait_idle(self) -> None:
        """All nodes, while all daemons live. Raises `MachineError` with what they are otherwise."""
        seen: list[Mapping[str, str]] = [{}]

        def all_idle() -> bool:
            seen.append(self.states())
            alive = all(one.all_live() for one in self.daemons.values() if one.machine.is_on)
            return alive and set(seen[-1]) == set(self.nodes) and set(seen[-1].values()) == {"idle"}

        try:
            wait_for("all nodes idle", all_idle, DEADLINE_S)
        except MachineError as error:
            raise MachineError(f"{error}: {seen[-1]}") from None

    def update(self, node: str, state: str, reason: str = "by a test") -> None:
        """As an administrator does: DRAIN, RESUME, DOWN."""
        why = [f"Reason={reason}"] if state != "RESUME" else []
        self.run("scontrol", "update", f"NodeName={node}", f"State={state}", *why)

    def cut_power(self, node: str) -> None:
        """All processes there die at once: no srun of that machine can cancel its step any more."""
        self.nodes[node].cut_power()
        del self.daemons[node]

    def power_on(self, node: str) -> None:
        """Its slurmd too, which then tells the controller that it is there."""
        machine = self.nodes[node]
        machine.power_on()
        self._prepare(machine)
        self._start("slurmd", machine)


def as_user(command: Iterable[str], user: User | None) -> tuple[list[str], dict[str, str], str]:
    """The command line, the environment and the folder to start it in."""
    words = list(command)
    return (words, {}, "/root") if user is None else (user.command(words), user.environment(), user.home)
