"""`torchrelay chaos`: what it plans, what it expects, whom it refuses, and that what it does is what it says."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.support.cli_chaos import row
from tests.support.jobs import wait_until
from tests.support.processes import is_stopped
from torchrelay.api.shown import IncidentTally, JobStatus, Ranks, RankStatus, SpareTally
from torchrelay.chaos import deeds, leaving, phases
from torchrelay.chaos.deeds import plan_deed, slow
from torchrelay.chaos.faults import Fault, Gone, observe, strike
from torchrelay.chaos.phases import await_phase, catch, last_phase
from torchrelay.chaos.whereabouts import Refusal, Whereabouts
from torchrelay.chaos.wishes import MIX, OF_RANKS, Deed, Facts, How, Phase, Wish, draw, outlook
from torchrelay.cli.diagnose.chaos import parser, seconds, wish_of
from torchrelay.client.runs import NotPossible
from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Rank, WorkerPhase
from torchrelay.schedulers.machine import RECORD, Machine, read_machine, write_machine
from torchrelay.wire.files.page import Page

JOB = JobId("job")
A, B = NodeId("node-0"), NodeId("node-1")


def facts(*rows: RankStatus, warm: int = 0, starting: int = 0, step_ms: float = 100.0) -> Facts:
    """A job of two ranks on two nodes, if nothing else is said."""
    ranks = rows or (row(0, A), row(1, B))
    job = JobStatus(
        job=JOB,
        phase="running",
        why="",
        generation=Generation(1),
        world_size=2,
        step=5,
        step_ms=step_ms,
        spares=SpareTally(wanted=1, warm=warm, starting=starting),
        incidents=IncidentTally(total=0, eligible=0, clean=0, open=0),
        restarts=0,
        joined=True,
        waiting_s=None,
        outcome=None,
    )
    return Facts(job, Ranks(job=JOB, generation=Generation(1), phase="running", ranks=tuple(ranks)))


# ---------------------------------------------------------------- words


@pytest.mark.parametrize(("text", "value"), [("20", 20.0), ("20s", 20.0), ("500ms", 0.5), ("2m", 120.0), ("1.5s", 1.5)])
def test_times_are_read(text: str, value: float) -> None:
    assert seconds(text) == value


def test_what_is_no_time_or_makes_no_sense_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["stop", "--rank", "1", "--for", "soon"])
    assert "'soon' is no time" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parser().parse_args(["kill", "--phase", "sleep"])
    for count in ("0", "-3"):
        with pytest.raises(SystemExit):
            parser().parse_args(["kill", "--repeat", count])
    assert "'sleep' is no phase: any, backward" in capsys.readouterr().err
    for words, complaint in ((["exit", "--code", "300"], "0 to 255"), (["slow", "--factor", "1"], "more than 1")):
        with pytest.raises(NotPossible, match=complaint):
            wish_of(parser().parse_args(words), random.Random(1))


def test_a_command_line_is_a_wish() -> None:
    given = parser().parse_args(["kill", "--rank", "3", "--phase", "gate", "--yes"])
    assert wish_of(given, random.Random(1)) == Wish(deed=Deed.KILL, rank=Rank(3), phase=Phase.GATE)
    given = parser().parse_args(["node", "--node", "node-1", "--how", "power", "--for", "20s"])
    assert wish_of(given, random.Random(1)) == Wish(deed=Deed.NODE, node=B, how=How.POWER, for_s=20.0)


def test_a_mix_is_drawn_by_its_seed() -> None:
    given = parser().parse_args(["any", "--repeat", "9"])

    def mix(seed: int) -> list[Wish]:
        chance = random.Random(seed)
        return [draw(wish_of(given, chance), facts(), chance) for _ in range(40)]

    assert mix(7) == mix(7) != mix(8)
    assert {wish.deed for wish in mix(7)} == set(MIX)
    assert all((wish.rank is not None) == (wish.deed in OF_RANKS) for wish in mix(7))


# ---------------------------------------------------------------- what should follow


def test_where_a_rank_goes_depends_on_the_spares() -> None:
    wish = Wish(deed=Deed.KILL, rank=Rank(1))
    warm = facts(row(0, A), row(1, B), row(None, B, state="warm"))
    assert outlook(wish, warm).text == "rank 1 goes to a warm spare (node-1.None on node-1)"
    assert "waits for one of 2 that are starting" in outlook(wish, facts(starting=2)).text
    assert "no spare: a new worker is started" in outlook(wish, facts()).text
    assert outlook(wish, facts()).incident


def test_a_short_stop_is_no_incident_and_a_long_one_is() -> None:
    def stop(for_s: float | None, step_ms: float = 100.0) -> bool:
        return outlook(Wish(deed=Deed.STOP, rank=Rank(1), for_s=for_s), facts(step_ms=step_ms)).incident

    assert [stop(1.4), stop(1.5), stop(None)] == [False, True, True]
    assert [stop(4.9, 1_000.0), stop(5.0, 1_000.0), stop(29.0, 1e6)] == [False, True, False]


def test_a_lost_node_needs_as_many_spares_elsewhere_as_it_held_ranks() -> None:
    wish = Wish(deed=Deed.NODE, node=B, how=How.POWER)
    held = (row(0, A), row(1, B))
    text = outlook(wish, facts(*held, row(None, A, state="warm"), row(None, B, state="warm"))).text
    assert text == "found by silence, after 6 to 30 s; ranks 1 go to warm spares elsewhere (1 there)"
    assert "0 are warm" in outlook(wish, facts(*held, row(None, B, state="warm"))).text
    empty = outlook(Wish(deed=Deed.NODE, node=B), facts(row(0, A), row(None, B, state="warm")))
    assert not empty.incident
    assert "holds no rank" in empty.text


@pytest.mark.parametrize("deed", [Deed.AGENT, Deed.ORCHESTRATOR, Deed.PARTITION, Deed.SLOW, Deed.MEND])
def test_what_touches_no_worker_interrupts_nothing(deed: Deed) -> None:
    assert not outlook(Wish(deed=deed, node=B, rank=Rank(0)), facts()).incident


# ---------------------------------------------------------------- who is refused


def note(folder: Path, **fields: object) -> Path:
    """The record of a run, of this very process if nothing else is said."""
    write_machine(folder, folder / "memory")
    found = read_machine(folder)
    assert isinstance(found, Machine)
    (folder / RECORD).write_bytes(msgspec.json.encode(msgspec.structs.replace(found, **fields)))
    return folder


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"boot": "another"}, "make faults there"),
        ({"uid": os.getuid() + 1}, "only its owner may break it"),
        ({"pid": 2**22 + 1}, "has ended"),
    ],
)
def test_runs_of_other_machines_or_users_and_those_that_ended_are_refused(
    tmp_path: Path, fields: dict[str, object], complaint: str
) -> None:
    with pytest.raises(Refusal, match=complaint):
        Whereabouts.of(note(tmp_path, **fields))


def test_a_run_without_a_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"has no machine\.json"):
        Whereabouts.of(tmp_path)


def test_what_cannot_be_hit_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    where = Whereabouts.of(note(tmp_path))
    (tmp_path / "nodes.json").write_text('{"nodes": [{"node": "node-0", "slots": 1, "agent_pid": 1}], "grants": []}')
    vacant = facts(row(0, A, state="vacant", pid=None), row(1, B))
    for wish, said, complaint in (
        (Wish(deed=Deed.KILL, rank=Rank(7)), facts(), "no rank 7"),
        (Wish(deed=Deed.KILL, rank=Rank(0)), vacant, "rank 0 has no process"),
        (Wish(deed=Deed.AGENT, node=B), facts(), "no node 'node-1'; there are node-0"),
        (Wish(deed=Deed.AGENT, node=A), facts(), "does not run at the moment"),
        (Wish(deed=Deed.ORCHESTRATOR), facts(), "does not run at the moment"),
        (Wish(deed=Deed.NODE, node=A, how=How.POWER), facts(), "with --isolate"),
        (Wish(deed=Deed.NODE, node=NodeId("node-9")), facts(), "nothing runs on node-9 .* this run: node-0"),
    ):
        with pytest.raises(Refusal, match=complaint):
            plan_deed(wish, said, where)


# ---------------------------------------------------------------- single processes


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[str]]:
    """A process that asks for memory all the time."""
    code = "import time; print('ready', flush=True)\nwhile True: x = bytearray(20 << 20); time.sleep(0.01)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate()


def apart(code: str) -> subprocess.CompletedProcess[str]:
    """In a process that is not the victim's parent, as for us it never is."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


@pytest.mark.skipif(bool(leaving.obstacle()), reason=f"ptrace: {leaving.obstacle()}")
def test_a_process_exits_by_itself_with_the_code_it_is_given(victim: subprocess.Popen[str]) -> None:
    done = apart(
        "from torchrelay.chaos.faults import observe; from torchrelay.chaos.leaving import leave\n"
        f"leave(observe({victim.pid}), 7)"
    )
    assert done.returncode == 0, done.stderr
    assert victim.wait(10) == 7


@pytest.mark.usefixtures("kernel_kills")
def test_the_kernel_kills_for_memory(victim: subprocess.Popen[str]) -> None:
    if not deeds.possible(victim.pid):
        pytest.skip("no memory cgroup can be made here")
    assert deeds.starve(observe(victim.pid)) == "the kernel killed it for memory"
    assert victim.wait(10) == -signal.SIGKILL


def test_a_slow_process_gets_its_share_and_goes_on_afterwards(victim: subprocess.Popen[str]) -> None:
    assert slow(observe(victim.pid), 3.0, 0.5) == "it ran 1/3 of the time for 0.5 s"
    wait_until("going on", lambda: not is_stopped(victim.pid), deadline_s=5)


def test_a_phase_is_waited_for(tmp_path: Path) -> None:
    page = Page(tmp_path / "page", create=True)
    page.enter(WorkerPhase.COMPUTING, 0)
    await_phase(tmp_path / "page", Phase.BACKWARD, 1.0)  # its steps took no time so far, so half has passed
    with pytest.raises(Refusal, match="was not in gate"):
        await_phase(tmp_path / "page", Phase.GATE, 0.01)
    assert last_phase(tmp_path / "page") == "computing"
    with pytest.raises(Refusal, match="no page yet"):
        await_phase(tmp_path / "other", Phase.GATE)
    assert last_phase(tmp_path / "other") == ""


def test_who_is_to_be_hit_in_a_phase_is_stopped_in_it(victim: subprocess.Popen[str], tmp_path: Path) -> None:
    page, found = Page(tmp_path / "page", create=True), observe(victim.pid)
    page.enter(WorkerPhase.GATE, 0)
    catch(tmp_path / "page", Phase.GATE, found, 5.0)
    assert is_stopped(victim.pid)
    strike(found, Fault.CONTINUE)
    page.enter(WorkerPhase.UPDATING, 0)
    with pytest.raises(Refusal, match="was not in gate"):
        catch(tmp_path / "page", Phase.GATE, found, 0.05)
    assert not is_stopped(victim.pid)
    victim.kill()
    victim.wait()
    with pytest.raises(Gone):
        catch(tmp_path / "page", Phase.UPDATE, found, 5.0)


def test_a_phase_that_is_over_by_the_signal_is_waited_for_again(
    victim: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, stops = Page(tmp_path / "page", create=True), []
    page.enter(WorkerPhase.GATE, 0)

    def stopped(pid: int) -> bool:
        """The first time the worker was quicker."""
        stops.append(pid)
        page.enter(WorkerPhase.UPDATING if len(stops) == 1 else WorkerPhase.GATE, 0)
        if len(stops) == 1:
            threading.Timer(0.05, page.enter, (WorkerPhase.GATE, 0)).start()
        return True

    monkeypatch.setattr(phases, "has_stopped", stopped)
    catch(tmp_path / "page", Phase.GATE, observe(victim.pid), 5.0)
    assert len(stops) == 2
