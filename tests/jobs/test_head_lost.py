"""The head's machine is lost: another one's orchestrator takes its place, and training goes on to the same bits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import faulty
from tests.support.jobs import Finished, differences, read_digests, wait_until
from tests.support.machines.fleet import CLI, EVIDENCE, Fleet, at, words_of
from tests.support.machines.harness import Machines
from tests.support.machines.needs import needs_machines
from tests.support.twins import undisturbed
from torchrelay.api.endpoint import ENDPOINT
from torchrelay.protocol.messages.ids import NodeId

pytestmark = [pytest.mark.timeout(300), needs_machines]

SCRIPT = faulty("--steps", "300", "--pace", "0.1")
FLAGS = ["--by-hand", "--nnodes", "2", "--nproc-per-node", "2", "--spare-nodes", "2"]
OTHERS = ("m2", "m3", "m4", "m5")


class Headless(Fleet):
    """A fleet whose launcher's machine may be lost."""

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
        folder = "/" + str(self.heirs()[on].relative_to(at(self.machines[on], "/")))
        done = self.machines[on].run([*CLI, verb, "--run-dir", folder, "-o", "json", *words], check=False)
        return json.loads(done.stdout) if done.returncode == 0 else None

    def over(self, on: str, deadline_s: float = 120) -> Finished:
        """Wait until the job has ended, although nobody follows it."""
        folder = self.heirs()[on]
        codes = {name: agent.wait(deadline_s) for name, agent in self.agents.items() if self.machines[name].is_on}
        assert set(codes.values()) == {0}, {name: self.said(name)[-2000:] for name in codes}
        kept = self.folder / "run"
        shutil.copytree(folder, kept)
        (kept / ENDPOINT).unlink(missing_ok=True)
        return Finished(0, "", kept, read_digests(self.evidence))


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Headless]:
    """Five machines: the launcher's, two of ranks, and two spare ones."""
    evidence = tmp_path / "evidence"
    evidence.mkdir()
    with Machines(5, shared={EVIDENCE: evidence}) as machines:
        yield Headless(machines, tmp_path, evidence)


def begun(fleet: Headless) -> None:
    """It trains, with warm spares, and two other nodes have copies of the journal."""
    fleet.start(SCRIPT, FLAGS)
    fleet.join(*OTHERS)
    fleet.until("warm spares", lambda: ((fleet.ask("status") or {}).get("spares") or {}).get("warm") == 4)
    fleet.until("two copies of the journal", lambda: len(settled_on(fleet)) == 2, deadline_s=30)
    fleet.until_steps(4)


def test_the_heads_machine_loses_its_power_and_then_a_rank_dies(fleet: Headless) -> None:
    begun(fleet)
    fleet.machines["m1"].cut_power()
    (head,) = wait_until("another head", fleet.heads, deadline_s=30)
    wait_until("it is heard", lambda: fleet.look(head, "status"), deadline_s=20)
    ranks = wait_until("the roster", lambda: fleet.look(head, "ranks"), deadline_s=20)
    rank = next(one for one in ranks["ranks"] if one["rank"] == 0)
    fleet.machines[rank["node"]].run(["kill", "-9", str(rank["pid"])])
    done = fleet.over(head)
    assert differences(done, undisturbed(SCRIPT)) == []
    assert [one["steps_lost"] for one in done.incidents()] == [0]
    assert NodeId(head) in OTHERS


def test_the_head_and_an_heir_are_lost_at_the_same_moment(fleet: Headless) -> None:
    begun(fleet)
    first = min(fleet.heirs())
    fleet.machines["m1"].cut_power()
    fleet.machines[first].cut_power()
    (head,) = wait_until("another head", fleet.heads, deadline_s=40)
    assert head != first
    done = fleet.over(head)
    assert differences(done, undisturbed(SCRIPT)) == []
    assert [one["steps_lost"] for one in done.incidents()] in ([], [0]), "that machine may have held spares only"


def test_a_head_that_was_frozen_wakes_up_and_gives_way(fleet: Headless) -> None:
    begun(fleet)
    (pid,) = [pid for pid in fleet.head.pids() if "torchrelay.orchestrator" in words_of(fleet.head, pid)]
    fleet.head.run(["kill", "-STOP", str(pid)])
    (head,) = wait_until("another head", fleet.heads, deadline_s=40)
    fleet.head.run(["kill", "-CONT", str(pid)])
    lost = next(name for name in OTHERS if name != head and name not in fleet.heirs())
    wait_until("it is heard", lambda: fleet.look(head, "status"), deadline_s=20)
    fleet.machines[lost].cut_power()
    done = fleet.end()
    assert done.code == 0, done.output
    assert differences(done, undisturbed(SCRIPT)) == []
    log = (done.run_dir / "logs" / "orchestrator.log").read_text()
    assert f"the orchestrator on {head} acts now" in log


def test_an_heir_that_is_lost_is_replaced_by_another(fleet: Headless) -> None:
    begun(fleet)
    before = sorted(fleet.heirs())
    fleet.machines[before[0]].cut_power()
    fleet.until(
        "another heir",
        lambda: before[0] not in (now := settled_on(fleet)) and len(now) == 2,
        deadline_s=60,
    )
    fleet.machines["m1"].cut_power()
    (head,) = wait_until("another head", fleet.heads, deadline_s=40)
    done = fleet.over(head)
    assert differences(done, undisturbed(SCRIPT)) == []
    assert all(one["steps_lost"] == 0 for one in done.incidents())


def settled_on(fleet: Headless) -> list[str]:
    """The nodes that have copies of the journal, as the head says."""
    log = at(fleet.head, "/tmp/run/logs/orchestrator.log").read_text()
    told = [line for line in log.splitlines() if "settled: copies" in line]
    return [name for name in OTHERS if told and f" {name}" in told[-1].partition("are on")[2].replace(";", ",")]
