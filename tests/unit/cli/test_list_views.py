"""The list views: each prints the same bytes as ever, as a table and as JSON. `REWRITE=1` records; review the diff."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchrelay.api import shown
from torchrelay.cli import main as command
from torchrelay.cli.registry import ROWS
from torchrelay.cli.view.lists import VIEWS
from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Rank, WorkerId
from torchrelay.wire.messages.pathnews import FindingNews, LinkNews, NetworkNews, PathNews

PAGES = Path(__file__).parents[2] / "pages"
JOB = JobId("train")
EMPTY = {  # what a run shows of which there is nothing to tell yet
    "ranks": shown.Ranks(job=JOB, generation=Generation(1), phase="starting", ranks=()),
    "nodes": shown.Nodes(nodes=(), freezes=()),
    "spares": shown.Spares(job=JOB, wanted=2, spares=()),
    "moves": shown.Moves(job=JOB, moves=()),
    "incidents": shown.Incidents(job=JOB, incidents=()),
    "audit": shown.Audit(calls=()),
}


def a_rank(rank: int | None, worker: str | None, **fields: object) -> shown.RankStatus:
    """A rank as it is while it computes, but for these fields."""
    usual: dict[str, object] = {
        "node": "node-0", "slot": 0, "pid": 4711, "state": "computing", "generation": 3, "step": 120, "section": None,
        "step_ms": 812.4, "in_state_ms": 35, "process": "R", "cpu_ms": 9_000, "silent_ms": 400, "replacement": False,
    }  # fmt: skip
    return shown.RankStatus(rank=rank, worker=worker, **(usual | fields))  # type: ignore[arg-type]


RANKS = shown.Ranks(
    job=JOB,
    generation=Generation(3),
    phase="training",
    ranks=(
        a_rank(0, "node-0.0.1"),
        a_rank(1, "node-0.1.1", section=2, shares_with=WorkerId("node-0.0.1"), process="S", in_state_ms=75_000),
        a_rank(
            12,
            None,
            node=None,
            slot=None,
            pid=None,
            state="vacant",
            generation=None,
            step=None,
            step_ms=None,
            in_state_ms=None,
            process=None,
            silent_ms=None,
        ),
        a_rank(2, "node-1.0.2", replacement=True, process="Q"),
        a_rank(None, "node-1.1.1", state="warm", step=None, step_ms=None),
    ),
)
TAINT = shown.TaintView(
    place="node-1",
    node=NodeId("node-1"),
    slot=None,
    key="gpu/ecc",
    value="63",
    effect="NoExecute",
    reason="too many errors",
    source="ann@host",
    since="2026-10-01T12:00:00.000Z",
    age_s=312.0,
    left_s=7_300.0,
    planned=False,
)
OWN = shown.TaintView(
    place="node-1/1",
    node=NodeId("node-1"),
    slot=1,
    key="drain",
    value="",
    effect="NoSchedule",
    reason="",
    source="probation",
    since="",
    age_s=4.0,
    left_s=None,
    planned=True,
)


def a_slot(slot: int, holds: str, rank: int | None = None, guests: int = 0) -> shown.SlotView:
    return shown.SlotView(
        slot=slot,
        holds=holds,
        rank=None if rank is None else Rank(rank),
        worker=None,
        life="",
        move="",
        why="",
        guests=(WorkerId("guest"),) * guests,
    )


NODES = shown.Nodes(
    nodes=(
        shown.NodeView(
            node=NodeId("node-0"),
            alive=True,
            lost_since="",
            silent_ms=300,
            incarnation="a",
            slots=(a_slot(0, "rank", 3, guests=1), a_slot(1, "spare")),
            taints=(),
            failures=(),
            silence="",
        ),
        shown.NodeView(
            node=NodeId("node-1"),
            alive=False,
            lost_since="2026-10-01T12:00:07.123Z",
            silent_ms=None,
            incarnation="b",
            slots=(a_slot(0, "free"), a_slot(1, "target", 3)),
            taints=(TAINT, OWN),
            failures=(
                shown.FailureView(slot=None, times=("2026-09-30T10:00:00.000Z",)),
                shown.FailureView(slot=1, times=tuple(f"2026-09-2{day}T10:0{day}:00.000Z" for day in range(4))),
            ),
            silence="not heard for 9 s",
        ),
    ),
    freezes=(shown.FreezeView(source="ann@host", reason="a demo"), shown.FreezeView(source="file F", reason="")),
)


def a_spare(worker: str, **fields: object) -> shown.SpareView:
    usual: dict[str, object] = {
        "node": "node-1", "slot": 1, "state": "warm", "target_of": None, "move": "", "prepared": False, "note": "",
        "refused": "",
    }  # fmt: skip
    return shown.SpareView(worker=worker, **(usual | fields))  # type: ignore[arg-type]


SPARES = shown.Spares(
    job=JOB,
    wanted=3,
    spares=(
        a_spare("node-1.1.1"),
        a_spare("node-1.2.1", target_of=3, move="M-1", prepared=True),
        a_spare("node-1.3.1", target_of=4, move="M-1", state="starting", refused="node-1 gpu/ecc=63:NoExecute " * 3),
    ),
)


def a_move(name: str, **fields: object) -> shown.MoveView:
    usual: dict[str, object] = {
        "kind": "planned", "state": "moved", "open": False, "ranks": (3, 4), "reason": "drained by ann@host",
        "legs": (
            shown.Leg(rank=Rank(3), node=NodeId("node-0"), slot=3, to_node=NodeId("node-1"), to_slot=1),
            shown.Leg(rank=Rank(4), to_node=NodeId("node-1")),
        ),
        "asked": "2026-10-01T12:03:04.005Z", "ended": "2026-10-01T12:03:09.005Z", "tries": 0, "why": "training goes on",
        "incident": "I-2", "pause_ms": 612, "story": (),
    }  # fmt: skip
    return shown.MoveView(name=name, job=JOB, **(usual | fields))  # type: ignore[arg-type]


MOVES = shown.Moves(
    job=JOB,
    moves=(
        a_move("M-1"),
        a_move(
            "M-2",
            open=True,
            state="preparing",
            tries=2,
            incident="",
            pause_ms=None,
            legs=(),
            why="waits for room",
            reason="a reason so long that nobody would read all of it in a table of many columns",
        ),
    ),
)


def a_fault(rank: int | None, detector: str) -> shown.FaultView:
    return shown.FaultView(
        at="2026-10-01T12:00:00.000Z",
        cause="SIGKILL",
        detector=detector,
        rank=None if rank is None else Rank(rank),
        worker=WorkerId("node-0.0.1"),
        node=NodeId("node-0"),
    )


def an_incident(name: str, **fields: object) -> shown.IncidentView:
    usual: dict[str, object] = {
        "generation": 2, "at": "2026-10-01T12:00:00.250Z", "resolution": "clean", "eligible": True,
        "kind": "unplanned", "move": "", "faults": (a_fault(1, "agent"), a_fault(0, "collective")),
        "verdict": "redo the step after 7", "resume_point": "step 7", "sources": (0,), "shares": {0: 4_000_000},
        "bytes": 4_000_000, "digest": "abc", "lost": 0, "phases": {"detect": 3, "agree": 4}, "pause_ms": 1_240,
        "story": (shown.Told(at="", after_ms=3, text="rank 1 moves to node-1.1.1"),), "summary": "", "cause": "SIGKILL",
    }  # fmt: skip
    return shown.IncidentView(name=name, job=JOB, **(usual | fields))  # type: ignore[arg-type]


INCIDENTS = shown.Incidents(
    job=JOB,
    incidents=(
        an_incident("I-1"),
        an_incident(
            "I-2",
            kind="planned",
            move="M-1",
            faults=(),
            verdict="",
            pause_ms=None,
            phases={},
            sources=(),
            shares={},
            bytes=0,
            digest="",
            cause="drained by ann@host",
        ),
        an_incident(
            "I-10",
            faults=(a_fault(2, "agent"), a_fault(None, "silence"), a_fault(1, "hang")),
            eligible=False,
            excluded="user bug",
            evidence="twice the same",
            cause="ValueError: " + "x" * 70,
        ),
    ),
)
AUDIT = shown.Audit(
    calls=(
        shown.AuditEntry(at="2026-10-01T12:00:00.250Z", who="ann@host", call="drain", what="node-1", seq=812),
        shown.AuditEntry(at="2026-10-01T12:01:00.250Z", who="bob@host", call="freeze", what="a demo", seq=0),
    )
)
LINKS = (
    LinkNews(remote="10.0.0.2", state="up", state_s=0.0, round_trip_us=812, sent_rate=1.5e6, received_rate=900.0),
    LinkNews(remote="10.0.0.3", state="down", state_s=130.0, reason="silent", flaps=2, sent_again=7, corrupt=1),
)
NETWORK = shown.NetworkView(
    nodes=(
        shown.NodeNetwork(
            node=NodeId("node-1"),
            alive=True,
            age_s=2.0,
            taints=(TAINT,),
            news=NetworkNews(
                paths=(
                    PathNews(path=0, interface="eth0", local="10.0.0.1", links=LINKS),
                    PathNews(
                        path=1,
                        interface="",
                        local="10.0.1.1",
                        links=LINKS[1:],
                        finding=FindingNews(
                            kind="down", where="here", evidence="no carrier", for_s=9.0, taint="network/eth1"
                        ),
                    ),
                ),
                processes=2,
                reports=7,
                malformed=1,
                strangers=2,
                left_out=3,
            ),
        ),
    )
)
FULL = {"ranks": RANKS, "nodes": NODES, "spares": SPARES, "moves": MOVES, "incidents": INCIDENTS, "audit": AUDIT}


class Fake:
    """An orchestrator that shows these."""

    def __init__(self, lists: dict[str, object]) -> None:
        self.lists = lists

    def __getattr__(self, name: str) -> object:
        return lambda *_: self.lists[name.removeprefix("view_")]

    def view_status(self) -> shown.Status:
        return shown.Status(version="", pid=1, at="", seq=1, degraded="", lease=1, jobs=(), nodes=())

    def view_network(self) -> shown.NetworkView:
        return NETWORK


def printed(lists: dict[str, object], *words: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What a verb prints about such a run."""
    (folder / "journal.db").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchrelay.client.client.Client.of", lambda _: Fake(lists))
        assert command.carry_out([*words, "--run-dir", str(folder)]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    return f"$ torchrelay {' '.join(words)}\n{told.out}"


@pytest.mark.parametrize(
    "verb", ["ranks", "nodes", "spares", "moves", "incidents", "audit", "report", "net status"]
)  # fmt: skip
def test_a_list_prints_the_same_bytes_as_ever(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, found = verb.split(), ""
    for lists in (FULL, EMPTY):
        for kind in ("table", "json"):
            found += printed(dict(lists), *words, "-o", kind, folder=tmp_path, capsys=capsys) + "\n"
    if verb == "ranks":
        found += printed(dict(FULL), "ranks", "--rank", "12", folder=tmp_path, capsys=capsys) + "\n"
    page = PAGES / f"{verb.replace(' ', '-')}.txt"
    if os.environ.get("REWRITE"):
        page.write_text(found)
    assert found == page.read_text()


def test_every_list_view_has_a_verb_and_every_verb_of_lists_a_view() -> None:
    assert [verb.name for verb in ROWS if verb.call == "lists:show_list"] == list(VIEWS)


def test_what_the_table_lists_is_what_this_page_checks() -> None:
    assert set(VIEWS) == set(FULL) == set(EMPTY)
