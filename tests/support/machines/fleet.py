"""Fleet: one job on several pretended machines, and how a test looks at it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.jobs import Finished, read_digests, wait_until
from tests.support.machines.harness import Machines
from tests.support.machines.machine import Machine
from tests.support.machines.process import Process
from torchrelay.api.endpoint import ENDPOINT

REPOSITORY = Path(__file__).parents[3]
CLI = (sys.executable, "-P", "-m", "torchrelay.cli.main")
RUN_DIR = "/tmp/run"  # on the machine of the launcher; nothing of it is seen on any other
EVIDENCE = "/root/evidence"  # the one folder that they share: what ranks tell of their states, for the test
PORT = 4100
ENVIRONMENT = {"TORCHRELAY_DIGESTS": EVIDENCE, "OMP_NUM_THREADS": "1"}


class Fleet:
    """A job whose launcher is on m1. `folder`: where what it prints is kept."""

    def __init__(self, machines: Machines, folder: Path, evidence: Path) -> None:
        self.machines = machines
        self.head = machines["m1"]
        self.folder = folder
        self.evidence = evidence
        self.agents: dict[str, Process] = {}
        self.process: Process

    # ------------------------------------------------------------ start

    def start(self, script: Sequence[str], flags: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        """`torchrelay run` on m1."""
        words = [*CLI, "run", "--run-dir", RUN_DIR, "--host", self.head.address, "--port", str(PORT)]
        with (self.folder / "run.out").open("w") as out:
            self.process = start(self.head, [*words, *flags, *script], out, env)

    def pass_text(self, role: str = "agent") -> str:
        """A pass of the run, as somebody would copy it."""
        path = at(self.head, f"{RUN_DIR}/passes/{role}.pem")
        wait_until(f"{role}.pem", lambda: path.exists() or self.ended(), deadline_s=20)
        return path.read_text()

    def hand_pass(self, machine: Machine, text: str, name: str = "agent.pem") -> str:
        """Put a pass on a machine; returns its place there."""
        place = at(machine, f"/root/{name}")
        place.touch(mode=0o600)
        place.write_text(text)
        return f"/root/{name}"

    def join(
        self, *names: str, flags: Sequence[str] = (), held: str = "", env: Mapping[str, str] | None = None
    ) -> None:
        """Somebody starts an agent by hand on each of these machines."""
        for name in names:
            machine = self.machines[name]
            place = self.hand_pass(machine, held or self.pass_text())
            words = [*CLI, "agent", "--join", f"{self.head.address}:{PORT}", "--token-file", place, *flags]
            with (self.folder / f"{name}.out").open("a") as out:
                self.agents[name] = start(machine, words, out, env)

    # ------------------------------------------------------------ looking

    def said(self, name: str = "run") -> str:
        return (self.folder / f"{name}.out").read_text()

    def ended(self) -> bool:
        """Fails with what it printed if the run has ended too early."""
        assert self.process.poll() is None, self.said()[-4000:]
        return False

    def ask(self, verb: str, *words: str, on: str = "m1") -> Any:
        """A verb's JSON; None if it has none to give."""
        done = self.machines[on].run([*CLI, verb, "--run-dir", RUN_DIR, "-o", "json", *words], check=False)
        return json.loads(done.stdout) if done.returncode == 0 else None

    def until_steps(self, steps: int) -> None:
        """Wait until rank 0 has stood at so many points."""
        path = self.evidence / "rank-0.jsonl"
        wait_until(
            f"{steps} points of rank 0",
            lambda: (path.exists() and path.read_text().count("\n") > steps) or self.ended(),
            deadline_s=60,
        )

    def until(self, what: str, fact: Any, *, deadline_s: float = 60) -> Any:
        return wait_until(what, lambda: fact() or self.ended(), deadline_s=deadline_s)

    def where(self, rank: int) -> str:
        """The node of a rank."""
        ranks = self.until("the roster", lambda: self.ask("ranks"))
        return next(str(one["node"]) for one in ranks["ranks"] if one["rank"] == rank)

    # ------------------------------------------------------------ end

    def end(self, *, timeout_s: float = 120) -> Finished:
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = self.head.run([*CLI, "status", "--run-dir", RUN_DIR], check=False).stdout
            raise AssertionError(f"no end within {timeout_s} s\n{status}\n{self.said()[-6000:]}") from None
        kept = self.folder / "run"
        shutil.copytree(at(self.head, RUN_DIR), kept)
        (kept / ENDPOINT).unlink()  # nobody is there, and out here that address may be somebody else's
        return Finished(code, self.said(), kept, read_digests(self.evidence))

    def agents_end(self) -> dict[str, int]:
        """The exit codes of agents that were started by hand and whose machines have power."""
        return {name: self.agents[name].wait(30) for name in self.agents if self.machines[name].is_on}


def start(machine: Machine, words: Sequence[str], out: Any, env: Mapping[str, str] | None) -> Process:
    """In the repository's folder, as a user would."""
    surroundings = {**ENVIRONMENT, **(env or {})}
    return machine.popen(words, env=surroundings, cwd=str(REPOSITORY), stdout=out, stderr=subprocess.STDOUT)


def at(machine: Machine, place: str) -> Path:
    """A file of a machine, as the test reaches it."""
    return machine.root / place.lstrip("/")


def words_of(machine: Machine, pid: int) -> list[str]:
    """The command line of a process, by the number that it has on its machine."""
    try:
        return at(machine, f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
