"""A run whose launcher's machine is lost, or cut off, is followed to its end all the same, and each line comes once."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.faults import faulty
from tests.support.jobs import differences, wait_until
from tests.support.machines.fleet import EVIDENCE, at
from tests.support.machines.harness import Machines
from tests.support.machines.headless import FLAGS, OTHERS, Headless, all_heard, begun, settled_on
from tests.support.machines.needs import needs_machines
from tests.support.twins import undisturbed

pytestmark = [pytest.mark.timeout(300), needs_machines]

SCRIPT = faulty("--steps", "300", "--pace", "0.1")
TICKER = """
import os, pathlib, sys, time
stop = pathlib.Path("/root/evidence/stop")
for number in range(10_000):
    print(f"tick {number}", flush=True)
    if stop.exists():
        sys.exit(3)
    time.sleep(0.1)
"""
LINE = re.compile(r"^\[(\d)\] (?:step|tick) (\d+)", re.MULTILINE)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Headless]:
    """Five machines: the launcher's, two of ranks, and two spare ones."""
    evidence = tmp_path / "evidence"
    evidence.mkdir()
    with Machines(5, shared={EVIDENCE: evidence}) as machines:
        yield Headless(machines, tmp_path, evidence)


def printed(text: str) -> dict[int, list[int]]:
    """The steps that each rank has printed, in the order in which they were shown."""
    found: dict[int, list[int]] = {}
    for rank, step in LINE.findall(text):
        found.setdefault(int(rank), []).append(int(step))
    return found


def each_once(text: str, *, again: int = 0) -> bool:
    """Whether no line was shown twice. `again`: steps that a rank may have printed twice itself, when it was lost."""
    return all(len(steps) - len(Counter(steps)) <= again for steps in printed(text).values())


def acting(text: str) -> list[str]:
    """The nodes whose orchestrator was said to act, one after the other."""
    return re.findall(r"the orchestrator on (m\d) acts now, at https://", text)


def steps_in_logs(fleet: Headless, on: str) -> dict[int, list[int]]:
    """What stands in the logs of a head that was an heir."""
    logs = {path.name: path.read_text() for path in (fleet.heirs()[on] / "logs").glob("rank-?.log")}
    return printed("".join(f"[{name[5]}] {line}\n" for name, text in logs.items() for line in text.splitlines()))


@pytest.mark.soak
def test_it_is_followed_from_another_machine_through_the_loss_of_two_heads(fleet: Headless) -> None:
    begun(fleet, SCRIPT)
    url = fleet.heirs_urls()[-1]
    held = fleet.hand_pass(fleet.machines["m5"], fleet.pass_text("operator"), "operator.pem")
    fleet.machines["m1"].cut_power()
    attached = fleet.attach("m5", "--url", url, "--ca", held)
    (first,) = wait_until("another head", fleet.heads, deadline_s=40)
    wait_until("it follows", lambda: f"on {first}: " in fleet.heard(), deadline_s=30)
    assert "Ctrl-C leaves it alone" in fleet.heard()
    wait_until("lines come", lambda: len(printed(fleet.heard()).get(0, ())) > 5, deadline_s=30)
    wait_until("copies elsewhere", lambda: len(settled_on(fleet, first)) == 2, deadline_s=40)
    lines = len(printed(fleet.heard())[0])
    wait_until("it has looked where they are", lambda: len(printed(fleet.heard())[0]) > lines + 30, deadline_s=60)
    wait_until("it hears all agents", lambda: all_heard(fleet, first), deadline_s=40)
    ranks = wait_until("the roster", lambda: fleet.look(first, "ranks"), deadline_s=20)["ranks"]
    fleet.machines[first].cut_power()
    second = wait_until("it follows", lambda: [one for one in acting(fleet.heard()) if one != first], deadline_s=40)[-1]
    places = {one["rank"]: one for one in ranks if one["rank"] is not None}
    if first not in {one["node"] for one in places.values()}:  # else its ranks are lost with it, which is enough
        rank = places[0]
        fleet.machines[rank["node"]].run(["kill", "-9", str(rank["pid"])])
    assert attached.wait(200) == 0, fleet.heard()
    said = fleet.heard()
    assert "I-1: " in said
    assert each_once(said, again=1)
    assert "[0] step 300 " in said
    assert "faulty ended with 0 after 300 steps" in said
    done = fleet.over(second)
    told, there = printed(said), steps_in_logs(fleet, second)
    assert all(set(steps) <= set(told[rank]) for rank, steps in there.items()), "no line of the head's is missing"
    assert differences(done, undisturbed(SCRIPT)) == []
    assert {one["steps_lost"] for one in done.incidents()} <= {0}


def test_on_a_node_it_needs_no_words_ctrl_c_leaves_the_job_and_the_scripts_code_is_its_own(fleet: Headless) -> None:
    for name in ("m1", *OTHERS):
        at(fleet.machines[name], "/root/train.py").write_text(TICKER)
    fleet.start(["/root/train.py"], FLAGS)
    fleet.join(*OTHERS)
    fleet.until("it prints", lambda: "[3] tick 5" in fleet.said(), deadline_s=60)
    fleet.until("two copies of the journal", lambda: len(settled_on(fleet)) == 2, deadline_s=60)
    fleet.machines["m1"].cut_power()
    (head,) = wait_until("another head", fleet.heads, deadline_s=40)
    attached = fleet.attach(head)
    wait_until("lines come", lambda: len(printed(fleet.heard()).get(3, ())) > 5, deadline_s=30)
    attached.send_signal(signal.SIGINT)
    assert attached.wait(10) == 130
    assert "not following any more. train goes on: `torchrelay attach` finds it again" in fleet.heard()
    folder = "/" + str(fleet.heirs()[head].relative_to(at(fleet.machines[head], "/")))
    again = fleet.attach(head, "--run-dir", folder, "-j", "train")
    wait_until("lines come", lambda: len(printed(fleet.heard(2)).get(3, ())) > 5, deadline_s=30)
    (fleet.evidence / "stop").touch()
    assert again.wait(60) == 3, fleet.heard(2)
    assert "train ended with 3" in fleet.heard(2)
    assert each_once(fleet.heard(2))
    fleet.over(head)
    late = fleet.attach(head, "--run-dir", folder)
    assert late.wait(30) == 3, fleet.heard(3)
    assert "the run ended at" in fleet.heard(3)


@pytest.mark.soak
def test_a_launcher_that_was_cut_off_follows_the_orchestrator_elsewhere(fleet: Headless) -> None:
    begun(fleet, SCRIPT)
    fleet.head.cut_link()
    (head,) = wait_until("another head", fleet.heads, deadline_s=40)
    wait_until("it trains", lambda: len(steps_in_logs(fleet, head).get(0, ())) > 10, deadline_s=40)
    fleet.head.mend_link()
    fleet.until("its word", lambda: f"the orchestrator on {head} acts now" in fleet.said(), deadline_s=40)
    before = steps_in_logs(fleet, head)
    done = fleet.end()
    assert done.code == 0, done.output
    assert each_once(done.output)
    assert "[0] step 300 " in done.output
    told = printed(done.output)
    assert all(set(steps) <= set(told[rank]) for rank, steps in before.items()), "no line of the head's is missing"
    assert "faulty ended with 0 after 300 steps" in done.output
    assert f"/heir on {head}" in done.output
    assert set(fleet.agents_end().values()) == {0}
    assert differences(done, undisturbed(SCRIPT)) == []
