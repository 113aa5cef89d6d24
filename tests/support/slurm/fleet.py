"""Fleet: one job of torchrelay in one batch job of Slurm, of an ordinary user, and how a test looks at it."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.jobs import Finished, read_digests, wait_until
from tests.support.machines.fleet import CLI, EVIDENCE, REPOSITORY, RUN_DIR, at, words_of
from tests.support.machines.machine import Machine
from tests.support.slurm.cluster import Slurm
from tests.support.slurm.job import Job
from tests.support.slurm.users import USER
from torchrelay.api.endpoint import ENDPOINT

# An ordinary user, where one can run this Python at all; else root, who has no need of more rights than she has.
NEEDED = [*REPOSITORY.parents, REPOSITORY, *Path(sys.executable).resolve().parents]
SUBMITTER = USER if all(folder.stat().st_mode & 0o005 == 0o005 for folder in NEEDED) else None
CODE, OUT = "/tmp/code", "/tmp/run.out"


class SlurmFleet:
    """`torchrelay run` in a batch script.

    `evidence`: the folder in which ranks tell of their states, for the test. `inside`: where it is on the machines.
    """

    def __init__(self, slurm: Slurm, evidence: Path, inside: str = EVIDENCE) -> None:
        self.slurm, self.evidence, self.inside = slurm, evidence, inside
        self.job: Job
        self.head: Machine

    def start(self, nodes: int, flags: Sequence[str], script: Sequence[str], *sbatch: str, srun: str = "") -> None:
        """Submit it, and wait until it runs. The batch script is on the first of the nodes.

        `srun`: what stands before `torchrelay run` there; else the script itself runs it.
        """
        exports = {"TORCHRELAY_DIGESTS": self.inside, "OMP_NUM_THREADS": "1"}
        words = [f"export {name}={shlex.quote(value)}" for name, value in exports.items()]
        line = f"{srun} {shlex.join([*CLI, 'run', '--run-dir', RUN_DIR, *flags, *script])}"
        words += [f"cd {shlex.quote(str(REPOSITORY))}", f"{line} > {OUT} 2>&1", f"echo $? > {CODE}"]
        self.job = self.slurm.submit(
            "\n".join(words), f"-N{nodes}", "--exclusive", "--no-kill", *sbatch, user=SUBMITTER
        )
        self.job.wait("RUNNING")
        self.head = self.slurm.nodes[self.job.batch_node()]

    def forget(self) -> None:
        """Nothing of it is left on the machines: the next run begins in the same places."""
        for machine in self.slurm.nodes.values():
            for left in (RUN_DIR, CODE, OUT) if machine.is_on else ():
                shutil.rmtree(at(machine, left), ignore_errors=True)
                at(machine, left).unlink(missing_ok=True)

    # ------------------------------------------------------------ looking

    def said(self) -> str:
        path = at(self.head, OUT)
        return path.read_text() if path.exists() else ""

    def ended(self) -> bool:
        """Fails with what it printed if the run has ended too early."""
        assert not at(self.head, CODE).exists(), self.said()[-4000:]
        return False

    def verb(self, *words: str) -> tuple[int, str, str]:
        """A verb on the machine of the launcher, by its user: code, output, errors."""
        done = self.slurm.run(*CLI, *words, "--run-dir", RUN_DIR, user=SUBMITTER, at=self.head.name, check=False)
        return done.returncode, done.stdout, done.stderr

    def ask(self, *words: str) -> Any:
        """A verb's JSON; None if it has none to give."""
        code, out, _ = self.verb(*words, "-o", "json")
        return json.loads(out) if code == 0 else None

    def until(self, what: str, fact: Callable[[], Any], *, deadline_s: float = 60) -> Any:
        return wait_until(what, lambda: fact() or self.ended(), deadline_s=deadline_s)

    def until_warm(self, spares: int) -> None:
        self.until("warm spares", lambda: ((self.ask("status") or {}).get("spares") or {}).get("warm") == spares)

    def until_steps(self, steps: int) -> None:
        """Wait until rank 0 has stood at so many points more."""
        path = self.evidence / "rank-0.jsonl"

        def points() -> int:
            return path.read_text().count("\n") if path.exists() else 0

        more = points() + steps
        self.until(f"{steps} points more of rank 0", lambda: points() > more)

    def where(self, rank: int) -> str:
        """The node of a rank."""
        ranks = self.until("the roster", lambda: self.ask("ranks"))
        return next(str(one["node"]) for one in ranks["ranks"] if one["rank"] == rank)

    def until_at(self, rank: int, fact: Callable[[str], bool]) -> str:
        """Wait until a rank is on such a node; returns it."""
        return str(self.until(f"rank {rank} moves", lambda: fact(node := self.where(rank)) and node))

    def rank_process(self, rank: int) -> tuple[Machine, int]:
        """Where a rank's process is, and its number there."""
        found = self.until("its process", lambda: [one for one in self.ask("ranks")["ranks"] if one["rank"] == rank])
        return self.slurm.nodes[found[0]["node"]], int(found[0]["pid"])

    # ------------------------------------------------------------ the head is lost

    def copies(self) -> int:
        """On how many other nodes the journal is, as the head says."""
        log = at(self.head, f"{RUN_DIR}/logs/orchestrator.log")
        told = [line for line in log.read_text().splitlines() if "settled: copies" in line] if log.exists() else []
        return sum(f" {name}" in told[-1].partition("are on")[2].replace(",", "") for name in self.slurm.nodes if told)

    def heir_that_acts(self) -> Path | None:
        """The folder of an heir that has become head, as the test reaches it."""
        for name, machine in self.slurm.nodes.items():
            for found in at(machine, "/tmp").glob(f"torchrelay-*/*/{name}/heir/{ENDPOINT}") if machine.is_on else ():
                return found.parent
        return None

    def end_without_launcher(self, folder: Path, head: Path, *, timeout_s: float = 120) -> Finished:
        """Wait until the job has ended, although no batch script is there, and copy what its head has left."""
        wait_until("the end of the Slurm job", lambda: self.job.state() != "RUNNING", deadline_s=timeout_s)
        kept = folder / "run"
        shutil.copytree(head, kept)
        (kept / ENDPOINT).unlink()
        return Finished(0, "", kept, read_digests(self.evidence))

    # ------------------------------------------------------------ end

    def end(self, folder: Path, *, timeout_s: float = 120) -> Finished:
        """Wait for the end of the batch script's line, and copy what is left of it."""
        wait_until(f"the end of the run; so far:\n{self.said()[-3000:]}", self._code, deadline_s=timeout_s)
        kept = folder / "run"
        shutil.copytree(at(self.head, RUN_DIR), kept)
        (kept / ENDPOINT).unlink()  # nobody is there, and out here that address may be somebody else's
        return Finished(int(self._code()), self.said(), kept, read_digests(self.evidence))

    def _code(self) -> str:
        path = at(self.head, CODE)
        return path.read_text() if path.exists() else ""

    def left(self) -> list[list[str]]:
        """Processes of torchrelay on machines that have power."""
        lit = [machine for machine in self.slurm.machines if machine.is_on]
        running = [words_of(machine, pid) for machine in lit for pid in machine.pids()]
        return [words for words in running if any("torchrelay" in word for word in words)]
