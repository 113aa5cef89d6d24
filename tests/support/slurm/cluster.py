"""The cluster: a controller, its nodes, and what a test does with them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

from tests.support.machines.harness import Machines
from tests.support.machines.machine import Machine
from tests.support.machines.process import Process, Stream
from tests.support.machines.waiting import MachineError, wait_for
from tests.support.slurm.conf import Site, slurm_conf
from tests.support.slurm.daemons import Daemons, new_key, put_files
from tests.support.slurm.job import DEADLINE_S, Job
from tests.support.slurm.users import USER, User, add_user

ROOT = None  # as a user: the one who administers Slurm


class Slurm:
    """A Slurm across machines, all of whose nodes are idle at the start.

    `folder`: where the words of its daemons are kept. `nodes`: by their names; all but the controller if none is named.
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
            for machine in (self.controller, *self.nodes.values()):
                self._prepare(machine)
            self._start("slurmctld", self.controller)
            for node in self.nodes.values():
                self._start("slurmd", node)
            self.wait_idle()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Raises `MachineError` if a process of a job is left, unless the test has failed anyway."""
        try:
            if error is None:
                self.cancel_all()
        finally:
            self._stop()
        if error is None and (left := self.left()):
            raise MachineError(f"left of Slurm's jobs: {left}")

    def _prepare(self, machine: Machine) -> None:
        put_files(machine, self.key, self.conf, self.site)
        add_user(machine, USER)
        self.daemons[machine.name] = Daemons(machine, self.folder)
        self.daemons[machine.name].start_munged()

    def _start(self, name: str, machine: Machine) -> None:
        flags = ["-D", "-c"] if name == "slurmctld" else ["-D"]
        self.daemons[machine.name].start(name, *flags)

    def _stop(self) -> None:
        for name in (*self.nodes, self.controller.name):
            if name in self.daemons and self.machines[name].is_on:
                self.machines[name].thaw()
                self.daemons[name].stop()

    def left(self) -> dict[str, list[str]]:
        """Processes of jobs and of Slurm's own that run on the machines, by their command lines."""
        found = {name: jobs_processes(self.machines[name]) for name in self.daemons if self.machines[name].is_on}
        return {name: lines for name, lines in found.items() if lines}

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

    def submit(self, script: str, *flags: str, user: User | None = ROOT, at: str = "", output: str = "/dev/null") -> Job:
        """Of a batch script, without its first line."""
        words = ["sbatch", "--parsable", f"--output={output}", *flags]
        said = self.run(*words, user=user, at=at, words=f"#!/bin/sh\n{script}\n").stdout
        return Job(self, int(said.strip().partition(";")[0]))

    def jobs(self) -> list[str]:
        """All that are not over, as `<number> <state> <nodes>`."""
        return self.run("squeue", "-h", "-o", "%i %T %N").stdout.splitlines()

    def cancel_all(self) -> None:
        """And wait until none holds a node. One on a node without power does so until that node is down."""
        if numbers := [line.split()[0] for line in self.jobs()]:
            self.run("scancel", *numbers, check=False)  # one may have ended just now
            wait_for("end of all jobs", lambda: not self.jobs(), 2 * self.site.lost_after_s + DEADLINE_S)

    # ------------------------------------------------------------ nodes

    def host_names(self, nodes: str) -> list[str]:
        """m[2-4] -> m2, m3, m4."""
        return self.run("scontrol", "show", "hostnames", nodes).stdout.split() if nodes else []

    def states(self) -> dict[str, str]:
        """Of all nodes, as "idle"; with "*" at the end, those that do not answer. None while the controller is silent."""
        said = self.run("sinfo", "-h", "-N", "-o", "%N %T", check=False).stdout
        return dict(line.split() for line in said.splitlines())

    def state(self, node: str) -> str:
        return self.states()[node]

    def wait_state(self, node: str, *states: str, deadline_s: float = DEADLINE_S) -> None:
        """Raises `MachineError` if it comes into none of them."""
        wait_for(f"{node} {' or '.join(states)}", lambda: self.state(node) in states, deadline_s)

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
        """All processes of that machine die at once: no srun there can cancel its step any more, and none hears of it."""
        self.nodes[node].cut_power()
        del self.daemons[node]

    def power_on(self, node: str) -> None:
        """Its slurmd too."""
        machine = self.nodes[node]
        machine.power_on()
        self._prepare(machine)
        self._start("slurmd", machine)

    def restore(self) -> None:
        """As at the start: links mended, power on, no job, all nodes idle."""
        self.machines.heal()
        for name, machine in self.nodes.items():
            machine.mend_link()
            if not machine.is_on:
                self.power_on(name)
            machine.thaw()
        self.cancel_all()
        for name, state in self.states().items():
            if state.rstrip("*") not in ("idle", "completing"):
                self.run("scontrol", "update", f"NodeName={name}", "State=RESUME", check=False)
        self.wait_idle()


def as_user(command: Iterable[str], user: User | None) -> tuple[list[str], dict[str, str], str]:
    """The command line, the environment and the folder to start it in."""
    words = list(command)
    return (words, {}, "/root") if user is None else (user.command(words), user.environment(), user.home)


def jobs_processes(machine: Machine) -> list[str]:
    """What runs on a machine in a job, and whatever of Slurm's own is there."""
    found = []
    for pid in machine.pids():
        folder = machine.root / f"proc/{pid}"
        try:
            words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            in_job = b"\0SLURM_JOB_ID=" in b"\0" + (folder / "environ").read_bytes()
        except OSError:
            continue  # it has ended
        if in_job or "slurm" in words:
            found.append(words)
    return found
