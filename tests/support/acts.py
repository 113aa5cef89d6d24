"""Acts: what a driver does to a job that trains (`tests.support.live`), and what must come of each.

    Strike   a process is broken in a phase of its training; with `second`, another one during the recovery
    Inside   something happens inside a phase of a move
    Move     ranks are moved, by an order, a taint, a drain
    Outer    a whole node, an agent, or the orchestrator is killed, whenever it comes

Every act ends when all is well again. Each asserts what the job must have come to; the bits are compared at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from tests.support.cells import ALL, SECONDS, Cell
from tests.support.live import Live, Look

WHENS = ("joining", "rehearsing", "halt heard", "standing", "catching up", "reconfigure", "restore", "resume")
WHOS = (
    "target", "source", "bystander", "orchestrator", "source's agent", "target's agent", "second", "untaint", "freeze",
)  # fmt: skip
AFTER_CUTOVER = ("reconfigure", "restore", "resume")
IMPOSSIBLE = {
    (
        "source",
        "resume",
    ): "the outgoing worker is fenced before anybody is told to resume: it is as dead as a kill makes it",
}
KEY = "test/ecc"


class Act(Protocol):
    """One thing to do."""

    def do(self, live: Live) -> None: ...


@dataclass(frozen=True)
class Strike:
    """A fault of a process in a phase of training."""

    cell: Cell

    def __str__(self) -> str:
        return str(self.cell)

    def do(self, live: Live) -> None:
        look = live.settled()
        rank, *others = live.chance.sample(range(4), 4)
        other = next(one for one in others if not look.deadly({rank, one}))
        name = live.name()
        plan: list[dict[str, Any]] = [
            {"id": name, "ranks": [rank], "from": (look.job.step or 0) + 3, "phase": self.cell.phase,
             "how": self.cell.how}
        ]  # fmt: skip
        names = [name]
        if self.cell.second:
            ranks = [rank] if self.cell.second in ("catch up", "restore") else [other]
            names.append(f"{name}s")
            plan.append({"id": names[1], "ranks": ranks, "phase": self.cell.second, "how": "kill", "after": name})
        live.arm("plan.json", plan)
        for one in names:
            live.mark(f"{one}.rank*")
        live.until("the incident", lambda now: now.job.incidents.total > look.job.incidents.total)
        live.settled()
        live.disarm()


# ---------------------------------------------------------------- inside a move


@dataclass(frozen=True)
class Inside:
    """`who` is hit, or what is asked for, `when` the move is in this phase."""

    who: str
    when: str
    how: str = "kill"

    def __str__(self) -> str:
        deed = f"{self.how} {self.who}" if self.who not in ("second", "untaint", "freeze") else self.who
        return f"{deed} while {self.when}"

    @property
    def witness(self) -> str:
        """Who sees this phase from the inside."""
        if self.who == "bystander" and self.when in ("halt heard", "standing", "reconfigure", "resume"):
            return "bystander"
        return "source" if self.when in ("halt heard", "standing") else "target"

    @property
    def comes_to_nothing(self) -> bool:
        """Whether the rank stays where it is."""
        return self.who == "untaint" and self.when not in AFTER_CUTOVER

    def do(self, live: Live) -> None:
        look = live.settled()
        rank, bystander = live.chance.sample(range(4), 2)
        name = live.name()
        source = look.holder(rank)
        live.arm(
            "cell.json",
            {
                "id": name,
                "who": self.who,
                "when": self.when,
                "how": self.how,
                "witness": self.witness,
                "rank": rank,
                "pids": {"source": source.pid, "bystander": look.holder(bystander).pid},
                "nodes": {"source": source.node},
                "run_dir": str(live.run_dir),
            },
        )
        by_taint = self.who == "untaint" or (self.who != "freeze" and live.chance.random() < 0.4)
        if by_taint:
            live.call("/v1/taint", node=source.node, slot=source.slot, key=KEY, reason="a test")
        else:
            live.migrate(rank)
        live.mark(f"{name}.struck")
        self.order(live, look, rank, bystander)
        (live.folder / f"{name}.done").touch()
        after = self.outcome(live, look, rank, bystander)
        live.disarm()
        if by_taint and self.who != "untaint":
            live.order("untaint", f"{source.node}/{source.slot}", KEY, "--healed")
        self.check(live, look, after, rank)
        live.settled()

    def order(self, live: Live, look: Look, rank: int, bystander: int) -> None:
        """What only an operator can do; the witness waits in its phase until it is done."""
        source = look.holder(rank)
        if self.who == "second":
            live.migrate(bystander)
        elif self.who == "untaint":
            live.call("/v1/untaint", node=source.node, slot=source.slot, key=KEY, healed=True)
        elif self.who == "freeze":
            live.freeze()

    def outcome(self, live: Live, look: Look, rank: int, bystander: int) -> Look:
        """Wait until the move has come to its end, whichever way."""
        known = len(look.moves)
        if self.who == "freeze":
            live.until("the end of the frozen move", lambda now: now.moves[known:] and not now.moves[known].open)
            live.unfreeze()

        def gone(now: Look, of: int) -> bool:
            return now.holder(of).worker not in (None, look.holder(of).worker)

        def over(now: Look) -> bool:
            if not now.well or not now.moves[known:]:
                return False
            elsewhere = gone(now, rank) and (self.who != "second" or gone(now, bystander))
            return self.comes_to_nothing or elsewhere

        return live.until(f"the outcome of {self} (rank {rank})", over)

    def check(self, live: Live, look: Look, after: Look, rank: int) -> None:
        """How the moves ended, by the ledger of moves."""
        states = [move.state for move in after.moves[len(look.moves) :]]
        early = self.when not in AFTER_CUTOVER
        if self.comes_to_nothing:
            wanted, where = [["called off"]], after.holder(rank).worker == look.holder(rank).worker
        else:
            wanted, where = [["done"]], after.holder(rank).node is not None
            if self.who == "freeze" and early:
                wanted = [["called off", "done"]]
            elif self.who == "second":
                wanted = [["done", "done"]]
            elif self.who == "source" and early:
                wanted = [["recovered"]]
                if (self.how, self.when) == ("stop", "catching up"):
                    wanted += [["done"]]  # it had handed over by then, and may be found out behind the cutover only
            elif self.who == "bystander":  # it may be the rank's own target that the bystander's recovery took
                wanted = [["done"], ["called off", "done"]]
                if stuck(live, rank, known=look.job.incidents.total):
                    wanted += [["recovered"]]
        if states not in wanted:
            live.wrong.append(f"{self}: moves ended {states}, not {' or '.join(map(str, wanted))}")
        if not where:
            live.wrong.append(f"{self}: rank {rank} is at {after.holder(rank).worker}")


def stuck(live: Live, rank: int, known: int) -> bool:
    """Whether Gloo has not let this rank out of its collective after a fault of another one: then it is replaced."""
    told = live.client.view_incidents().incidents[known:]
    return any(fault.rank == rank and "does not come out" in fault.cause for one in told for fault in one.faults)


POSSIBLE = [Inside(who, when) for who in WHOS for when in WHENS if (who, when) not in IMPOSSIBLE]


# ---------------------------------------------------------------- moves by themselves


@dataclass(frozen=True)
class Move:
    """Ranks are moved, and nothing else happens."""

    kind: str

    def __str__(self) -> str:
        return self.kind

    def do(self, live: Live) -> None:
        look = live.settled()
        match self.kind:
            case "migrate one rank":
                self.migrate(live, look, [live.chance.randrange(4)])
            case "migrate two ranks":
                self.migrate(live, look, live.chance.sample(range(4), 2))
            case "migrate to a node":
                self.migrate(live, look, [live.chance.randrange(4)], elsewhere=True)
            case "taint a slot":
                self.taint(live, look)
            case "taint a slot for 3 s":
                self.taint(live, look, "--ttl", "3s")
            case "drain and undrain":
                self.drain(live, look)
        live.settled()

    def migrate(self, live: Live, look: Look, ranks: list[int], *, elsewhere: bool = False) -> None:
        to = self.way(live, look, ranks[0]) if elsewhere else []
        live.order("migrate", *map(str, ranks), *to, "--reason", "a test")
        before = {rank: look.holder(rank).worker for rank in ranks}
        after = live.until(
            f"{self.kind} of {ranks} {to}",
            lambda now: now.well and all(now.holder(rank).worker not in (None, before[rank]) for rank in ranks),
        )
        for rank in ranks:
            if to and after.holder(rank).node != to[1] and not live.home:
                live.wrong.append(f"rank {rank} went to {after.holder(rank).node}, not to {to[1]}")

    def way(self, live: Live, look: Look, rank: int) -> list[str]:
        """To a node where a spare is: home if it can be, as an outgoing worker that returns does."""
        here = look.holder(rank).node
        there = {str(row.node) for row in look.ranks.ranks if row.rank is None and row.worker and row.node != here}
        home = live.nodes[rank]
        return ["--to", home if home in there else live.chance.choice(sorted(there))] if there else []

    def taint(self, live: Live, look: Look, *ttl: str) -> None:
        source = look.holder(live.chance.randrange(4))
        place = f"{source.node}/{source.slot}"
        live.order("taint", place, f"{KEY}=23", *ttl, "--reason", "a test")
        rank = source.rank
        assert rank is not None, "it is a holder's row"
        if not ttl:
            live.until("the move", lambda now: now.well and now.holder(rank).worker not in (None, source.worker))
            live.order("untaint", place, KEY, *live.chance.choice([[], ["--healed"]]))
            return
        live.until("the end of the taint", lambda now: now.well and not live.taints(KEY))

    def drain(self, live: Live, look: Look) -> None:
        node = str(look.holder(live.chance.randrange(4)).node)
        live.order("drain", node, "--reason", "a test")
        live.until("an empty node", lambda now: now.well and all(row.node not in (None, node) for row in now.held))
        live.order("undrain", node)


MOVES = [
    Move(kind)
    for kind in (
        "migrate one rank",
        "migrate two ranks",
        "migrate to a node",
        "taint a slot",
        "taint a slot for 3 s",
        "drain and undrain",
    )
]


# ---------------------------------------------------------------- from outside


@dataclass(frozen=True)
class Outer:
    """What keeps the workers is killed, or a whole node with them."""

    kind: str

    def __str__(self) -> str:
        return f"kill {self.kind}"

    def do(self, live: Live) -> None:
        look = live.settled()
        where = live.whereabouts()
        nodes = sorted(where.agents())
        if self.kind == "a node":
            nodes = [node for node in nodes if not look.deadly({row.rank for row in look.held if row.node == node})]
        node = live.chance.choice(nodes)
        match self.kind:
            case "a node":
                live.order("chaos", "node", "--node", node, "--how", "kill", "--no-wait")
                ranks = [row.rank for row in look.held if row.node == node]
                if ranks:
                    live.until("the loss", lambda now: now.job.incidents.total > look.job.incidents.total)
            case "an agent":
                pid = where.agent(node)
                live.order("chaos", "agent", "--node", node, "--no-wait")
                live.until("another agent", lambda _: live.whereabouts().agents()[node] not in (None, pid))
            case "the orchestrator":
                lease = look.job.lease
                live.order("chaos", "orchestrator", "--no-wait")
                live.until("another orchestrator", lambda now: now.job.lease > lease)
        live.settled()


OUTER = [Outer(kind) for kind in ("a node", "an agent", "the orchestrator")]


EVERY: list[Act] = [*map(Strike, ALL + SECONDS), *POSSIBLE, *MOVES, *OUTER]
