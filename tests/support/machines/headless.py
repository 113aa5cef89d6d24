"""Headless: a job over machines whose launcher's machine may be lost, and how a test looks at it then."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.jobs import Finished, read_digests
from tests.support.machines.fleet import CLI, Fleet, at, start
from tests.support.machines.process import Process
from torchrelay.api.endpoint import ENDPOINT

FLAGS = ["--by-hand", "--nnodes", "2", "--nproc-per-node", "2", "--spare-nodes", "2"]
OTHERS = ("m2", "m3", "m4", "m5")


class Headless(Fleet):
    """A fleet whose launcher's machine may be lost."""

    attached = 0  # so often somebody has attached

    def heirs(self) -> dict[str, Path]:
        """The folders of heirs, by their machines, as the test reaches them."""
        found = {}
        for name in OTHERS:
            machine = self.machines[name]
            if machine.is_on:
                for path in at(machine, "/tmp").glob(f"torchrelay-*/*/{name}/heir"):
                    found[name] = path
        return found

    def heads(self) -> list[str]:
        """The machines on which an heir has become head."""
        return [name for name, folder in self.heirs().items() if (folder / ENDPOINT).exists()]

    def look(self, on: str, verb: str, *words: str) -> Any:
        """A verb's JSON, asked on the machine of a head that was an heir."""
        done = self.machines[on].run([*CLI, verb, "--run-dir", self.folder_of(on), "-o", "json", *words], check=False)
        return json.loads(done.stdout) if done.returncode == 0 else None

    def folder_of(self, heir: str) -> str:
        """The run's folder of an heir, as it is called on its machine."""
        return "/" + str(self.heirs()[heir].relative_to(at(self.machines[heir], "/")))

    def over(self, on: str, deadline_s: float = 120) -> Finished:
        """Wait until the job has ended, although nobody follows it."""
        folder = self.heirs()[on]
        codes = {name: agent.wait(deadline_s) for name, agent in self.agents.items() if self.machines[name].is_on}
        assert set(codes.values()) == {0}, {name: self.said(name)[-2000:] for name in codes}
        kept = self.folder / "run"
        shutil.copytree(folder, kept)
        (kept / ENDPOINT).unlink(missing_ok=True)
        return Finished(0, "", kept, read_digests(self.evidence))

    # ------------------------------------------------------------ followed from elsewhere

    def heirs_urls(self) -> list[str]:
        """Where the launcher has said that copies of the journal are."""
        return list(
            self.until("its word on copies", lambda: re.findall(r"--url (https://\S+)", self.said()), deadline_s=30)
        )

    def attach(self, on: str, *words: str) -> Process:
        """`torchrelay attach` on a machine; what it prints is kept under the name of its flags' number."""
        self.attached += 1
        with (self.folder / f"attach-{self.attached}.out").open("w") as out:
            return start(self.machines[on], [*CLI, "attach", *words], out, {"PYTHONUNBUFFERED": "1"})

    def heard(self, number: int = 1) -> str:
        """What one that attached has printed."""
        return self.said(f"attach-{number}")


def begun(fleet: Headless, script: Sequence[str], flags: Sequence[str] = ()) -> None:
    """It trains, with warm spares, and two other nodes have copies of the journal."""
    fleet.start(script, [*FLAGS, *flags])
    fleet.join(*OTHERS)
    fleet.until("warm spares", lambda: ((fleet.ask("status") or {}).get("spares") or {}).get("warm") == 4)
    fleet.until("two copies of the journal", lambda: len(settled_on(fleet)) == 2, deadline_s=30)
    fleet.until_steps(4)


def settled_on(fleet: Headless, by: str = "") -> list[str]:
    """The nodes that have copies of the journal, as the head says: the launcher's, or one `by` this node."""
    logs = fleet.heirs()[by] if by else at(fleet.head, "/tmp/run")
    told = [line for line in (logs / "logs" / "orchestrator.log").read_text().splitlines() if "settled: copies" in line]
    return [name for name in OTHERS if told and f" {name}" in told[-1].partition("are on")[2].replace(";", ",")]


def all_heard(fleet: Headless, by: str) -> bool:
    """Whether the head on this node hears all agents: each of them knows by then who may take its place."""
    nodes = (fleet.look(by, "nodes") or {}).get("nodes", ())
    silent_ms = [one["silent_ms"] for one in nodes if one["alive"]]
    return bool(silent_ms) and all(each is not None and each < 1500 for each in silent_ms)
