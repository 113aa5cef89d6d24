"""The head's machine is lost: another one's orchestrator takes its place, and training goes on to the same bits."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.faults import faulty
from tests.support.jobs import differences, wait_until
from tests.support.machines.fleet import CLI, EVIDENCE, words_of
from tests.support.machines.harness import Machines
from tests.support.machines.headless import OTHERS, Headless, begun, settled_on
from tests.support.machines.needs import needs_machines
from tests.support.twins import undisturbed
from torchrelay.protocol.messages.ids import NodeId

pytestmark = [pytest.mark.timeout(300), needs_machines]

SCRIPT = faulty("--steps", "300", "--pace", "0.1")
PARKED = f"{EVIDENCE}/parked"  # all machines reach it


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Headless]:
    """Five machines: the launcher's, two of ranks, and two spare ones."""
    evidence = tmp_path / "evidence"
    evidence.mkdir()
    with Machines(5, shared={EVIDENCE: evidence}) as machines:
        yield Headless(machines, tmp_path, evidence)


def test_the_heads_machine_loses_its_power_and_then_a_rank_dies(fleet: Headless) -> None:
    begun(fleet, SCRIPT)
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


@pytest.mark.soak
def test_the_head_and_an_heir_are_lost_at_the_same_moment(fleet: Headless) -> None:
    begun(fleet, SCRIPT)
    first = min(fleet.heirs())
    fleet.machines["m1"].cut_power()
    fleet.machines[first].cut_power()
    (head,) = wait_until("another head", fleet.heads, deadline_s=40)
    assert head != first
    done = fleet.over(head)
    assert differences(done, undisturbed(SCRIPT)) == []
    assert [one["steps_lost"] for one in done.incidents()] in ([], [0]), "that machine may have held spares only"


@pytest.mark.soak
def test_a_head_that_was_frozen_wakes_up_and_gives_way(fleet: Headless) -> None:
    begun(fleet, SCRIPT)
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


@pytest.mark.soak
def test_an_heir_that_is_lost_is_replaced_by_another(fleet: Headless) -> None:
    begun(fleet, SCRIPT)
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


@pytest.mark.soak
def test_the_head_is_lost_and_the_next_one_parks_the_job(fleet: Headless) -> None:
    begun(fleet, SCRIPT, ["--park-dir", PARKED])
    fleet.machines["m1"].cut_power()
    (head,) = wait_until("another head", fleet.heads, deadline_s=40)
    wait_until("it is heard", lambda: fleet.look(head, "status"), deadline_s=20)
    fleet.machines[head].run([*CLI, "park", "--yes", "--run-dir", fleet.folder_of(head)])
    done = fleet.over(head)
    assert [one["steps_lost"] for one in done.incidents()] == [0]

    shutil.rmtree(done.run_dir)
    begins, *others = (name for name in OTHERS if name != head)
    fleet.head = fleet.machines[begins]
    fleet.start(SCRIPT, ["--by-hand", "--nnodes", "2", "--nproc-per-node", "2", "--resume", PARKED])
    fleet.join(*others)
    done = fleet.end()
    assert done.code == 0, done.output[-3000:]
    assert differences(done, undisturbed(SCRIPT)) == []
