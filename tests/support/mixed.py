"""Mixed: incidents of all kinds, dealt by a seed, done to one job after the other; and what their ledgers come to.

The job, the strikes and the twin are those of `tests.support.live` and `tests.support.acts`; bench/guarantee.py
runs it.
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.acts import MOVES, POSSIBLE, Act, Move, Outer, Strike
from tests.support.cells import ALL, SECONDS
from tests.support.jobs import Finished, torchrelay
from tests.support.live import SPARES, Live, Look, Twin, doubled
from torchrelay.chaos.faults import Gone
from torchrelay.chaos.whereabouts import Refusal
from torchrelay.cli.view.guarantee import read_ledger
from torchrelay.client.client import Away as Unheard
from torchrelay.client.client import Denied
from torchrelay.goodput.ledger import Entry, RatioPart, find
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.model.incident import UNSETTLED

FLAGS = ["--probation", "3s"]
PACE_S = 0.1  # added to each step: the twin is to be done in a fraction of the time, and spares start meanwhile
MOST_STEPS = 9_000  # of one job: the learning-rate schedule of the script has 10,000
LAYOUTS = ("ddp", "hsdp")


# ---------------------------------------------------------------- acts of its own


@dataclass(frozen=True)
class LoseNode:
    """All processes of a node that holds ranks are killed at once, its pages removed."""

    def __str__(self) -> str:
        return "lose a node with ranks"

    def do(self, live: Live) -> None:
        look = live.settled()
        nodes = [node for node in sorted({str(row.node) for row in look.held}) if not look.deadly(ranks_on(look, node))]
        if not nodes:
            return  # each holds the last replica of some shard: nothing to go on from, by any means
        live.order("chaos", "node", "--node", live.chance.choice(nodes), "--how", "kill", "--no-wait")
        live.until("the loss", lambda now: now.job.incidents.total > look.job.incidents.total)
        live.settled()


def ranks_on(look: Look, node: str) -> set[int | None]:
    return {row.rank for row in look.held if row.node == node}


@dataclass(frozen=True)
class Away:
    """A rank is killed while those who would see it are away: the orchestrator, or the agent of its node."""

    who: str

    def __str__(self) -> str:
        return f"kill {self.who}, and at once a rank"

    def do(self, live: Live) -> None:
        look = live.settled()
        rank, name, where = live.chance.randrange(4), live.name(), live.whereabouts()
        node = look.holder(rank).node
        pid = where.orchestrator() if self.who == "the orchestrator" else where.agent(NodeId(str(node)))
        first = (look.job.step or 0) + 2
        live.arm("plan.json", [{"id": name, "ranks": [rank], "from": first, "phase": "backward", "how": "kill"}])
        os.kill(pid, signal.SIGKILL)
        live.mark(f"{name}.rank*")
        live.until("the incident", lambda now: now.job.incidents.total > look.job.incidents.total)
        live.settled()
        live.disarm()


# ---------------------------------------------------------------- the schedule


@dataclass(frozen=True)
class Kind:
    """Acts of one kind. `share`: of 100 dealt; `spares`: warm before it; `interrupts`: by itself it stops training."""

    name: str
    share: int
    acts: tuple[Act, ...]
    spares: int = 1
    interrupts: bool = True


def strikes(how: str, *phases: str) -> tuple[Act, ...]:
    return tuple(Strike(cell) for cell in ALL if cell.how == how and (not phases or cell.phase in phases))


IN_A_MOVE = tuple(one for one in POSSIBLE if one.who in ("source", "bystander", "orchestrator", "source's agent"))
KINDS = (
    Kind("SIGKILL of a rank", 30, strikes("kill")),
    Kind("hang (SIGSTOP)", 8, strikes("stop", "forward", "backward", "gate", "update")),
    Kind("exit, exception, out of memory", 12, (*strikes("exit"), *strikes("raise"), *strikes("oom"))),
    Kind("second fault in a recovery", 10, tuple(Strike(cell) for cell in SECONDS), spares=2),
    Kind("fault in a move", 6, IN_A_MOVE, spares=2),
    Kind("node lost", 5, (LoseNode(),), spares=2),
    Kind("taint", 8, (Move("taint a slot"),)),
    Kind("planned move", 8, tuple(one for one in MOVES if one.kind.startswith("migrate")), spares=2),
    Kind("drain", 4, (Move("drain and undrain"),), spares=2),
    Kind("rank killed, orchestrator away", 4, (Away("the orchestrator"),)),
    Kind("rank killed, its agent away", 3, (Away("its agent"),)),
    Kind("agent killed", 1, (Outer("an agent"),), interrupts=False),
    Kind("orchestrator killed", 1, (Outer("the orchestrator"),), interrupts=False),
)


def deal(seed: int, kinds: Sequence[Kind] = KINDS) -> Iterator[tuple[Kind, Act]]:
    """Acts without end: of each hundred as many of a kind as its share says; and of a kind each act in turn."""
    chance = random.Random(seed)
    hands: dict[str, list[Act]] = {kind.name: [] for kind in kinds}
    while True:
        deck = [kind for kind in kinds for _ in range(kind.share)]
        chance.shuffle(deck)
        for kind in spread(deck):
            hand = hands[kind.name]
            if not hand:
                hand += chance.sample(kind.acts, len(kind.acts))
            yield kind, hand.pop()


def spread(deck: Sequence[Kind]) -> list[Kind]:
    """The same cards, so that the first few are of as many kinds as there are: a short run is to be mixed, too."""
    first = list(dict.fromkeys(deck))
    rest = list(deck)
    for kind in first:
        rest.remove(kind)
    return first + rest


# ---------------------------------------------------------------- one job


class Soak(Live):
    """A job that waits for as many warm spares as the next act uses up, and not for all."""

    need = SPARES

    def settled(self) -> Look:
        self.clear_quarantines()
        look = self.until("all is well again", lambda look: look.well and look.warm >= self.need)
        step = look.job.step or 0
        return self.until("steps after that", lambda look: look.well and (look.job.step or 0) > step + 2)


@dataclass
class Chapter:
    """One job: what was done to it, and what came of it. `kinds`: of an incident, by its name, what it was dealt as."""

    number: int
    layout: str
    run_dir: Path
    acts: Counter[str] = field(default_factory=Counter)
    kinds: dict[str, str] = field(default_factory=dict)
    silent: Counter[str] = field(default_factory=Counter)  # acts that were to interrupt, and did not
    wrong: list[str] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    done: Finished | None = None

    @property
    def steps(self) -> int:
        """The newest step at which any rank stood."""
        return 0 if self.done is None else max((int(at.partition("+")[0]) for _, at in self.done.digests), default=0)


def run_chapter(
    work: Path, number: int, layout: str, cards: Iterator[tuple[Kind, Act]], wanted: int, tell: Callable[[str], None]
) -> Chapter:
    """Do acts to one job until so many interruptions of it count. What goes wrong ends the job, and is told in it."""
    folder = work / f"{number}-{layout}"
    folder.mkdir(parents=True)
    chapter = Chapter(number, layout, folder / "run")
    try:
        live = Soak.begin(folder, number, FLAGS, pace_s=PACE_S, layout=layout)
    except AssertionError as error:  # what the jobs before it have shown is not lost with it
        chapter.wrong.append(f"job {number} ({layout}) did not begin: {error}")
        return chapter
    act: Act | str = "the start"
    try:
        while (counted := attribute(live, chapter)) < wanted:
            kind, act = next(cards)
            tell(f"{layout}: {counted} of {wanted} interruptions, next: {act}")
            live.need = kind.spares
            known = len(chapter.kinds)
            act.do(live)
            chapter.acts[kind.name] += 1
            attribute(live, chapter, kind.name)
            if kind.interrupts and len(chapter.kinds) == known:
                chapter.silent[str(act)] += 1
            if (live.settled().job.step or 0) > MOST_STEPS:
                break
        act = "the end"
        chapter.done = live.end()
    except (AssertionError, Unheard, Denied, Refusal, Gone) as error:  # a fact that did not come in its time
        chapter.wrong.append(f"job {number} ({layout}), in {act}: {error}")
    finally:
        # Before it is ended: to end it is an operator's stop, and would excuse what was not resolved.
        try:
            chapter.entries = entries_of(chapter)
        finally:
            live.kill()  # also if there is no ledger to read
    chapter.wrong += dict.fromkeys(live.wrong)
    return chapter


def attribute(live: Live, chapter: Chapter, kind: str = "by itself") -> int:
    """Note what the new incidents were dealt as. Returns how many count so far and are over."""
    incidents = live.client.view_incidents().incidents
    for one in incidents:
        chapter.kinds.setdefault(one.name, kind)
    return sum(one.eligible and one.resolution not in UNSETTLED for one in incidents)


def entries_of(chapter: Chapter) -> list[Entry]:
    """The ledger, as `torchrelay report` tells it after the end, kept beside the run's folder."""
    told = torchrelay("report", "--run-dir", str(chapter.run_dir), "-o", "jsonl")
    path = chapter.run_dir.parent / f"ledger-{chapter.number}-{chapter.layout}.jsonl"
    path.write_text(told.stdout)
    if told.returncode != 0:
        chapter.wrong.append(f"job {chapter.number} ({chapter.layout}) has no ledger: {told.stderr.strip()}")
    return read_ledger(path)


# ---------------------------------------------------------------- what it came to


def compare(chapters: Sequence[Chapter], twins: dict[str, Twin]) -> list[str]:
    """Where any job differs from its undisturbed twin: in bits, in points, or in who computed for a rank."""
    told = []
    for chapter in sorted(chapters, key=lambda one: -one.steps):  # so that one twin of each layout is long enough
        name = f"job {chapter.number} ({chapter.layout})"
        if chapter.done is None:
            told.append(f"{name} did not come to its end")
            continue
        if chapter.done.code != 0:
            told.append(f"{name} ended with {chapter.done.code}: {chapter.done.output[-1000:]}")
        told += [f"{name}: {text}" for text in twins[chapter.layout].differences(chapter.done)[:10]]
        told += [f"{name}: {text}" for text in doubled(chapter.run_dir.parent / "run-digests")]
    return told


def repeated(done: Finished) -> list[str]:
    """Points at which a rank stood with more than one state: samples seen twice, or left out, would make such."""
    return [f"rank {rank} at {point}" for (rank, point), digests in done.digests.items() if len(digests) != 1]


def by_kind(chapters: Sequence[Chapter]) -> dict[str, list[int]]:
    """Of each kind that was dealt: how many interruptions count, and how many of these are clean."""
    found: dict[str, list[int]] = {}
    for chapter in chapters:
        for one in map(find, chapter.entries):
            if one.standing in (RatioPart.CLEAN, RatioPart.NOT_CLEAN):
                row = found.setdefault(chapter.kinds.get(one.id, "by itself"), [0, 0])
                row[0] += 1
                row[1] += one.standing is RatioPart.CLEAN
    return dict(sorted(found.items(), key=lambda item: -item[1][0]))
