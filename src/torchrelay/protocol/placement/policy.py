"""Policy: choices, each with its reason in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torchrelay.protocol.messages.events import JobSpec
from torchrelay.protocol.messages.ids import START, NodeId, Point, Rank, WorkerPhase
from torchrelay.protocol.messages.orders import Verdict
from torchrelay.protocol.model import facts
from torchrelay.protocol.model.roster import Life, Seat, Worker, natural_key
from torchrelay.protocol.model.table import Table

# Generations in a row in which nothing was committed, before the job stops trying.
GENERATION_BUDGET = 20
# Starts in a row that never committed anything, before the script is left to its error.
START_BUDGET = 3
# And also those that ended with nodes: a rack may fall one node after another.
MOST_STARTS = 30
# Times that a job goes back to a snapshot from the same step, before it is left to its error.
ROLL_BUDGET = 3
# Sources that are named to one that needs the state. Where there are more replicas, each replacement gets others.
MOST_SOURCES = 16
# How long a process may take to end after the script's exception left it.
DYING_MS = 10_000
# A rank that has not joined so long after all ranks were connected never will.
UNJOINED_MS = 600_000
# How long the processes of a job that ends are waited for: one in an uninterruptible sleep may never be gone.
ENDING_MS = 60_000


def choose_spare(
    spares: Iterable[Worker],
    rank: Rank,
    *,
    near: NodeId | None,
    last: Callable[[Worker], bool] = lambda _: False,
    apart: Callable[[Worker], bool] = lambda _: True,
    host: Callable[[Worker], Worker | None] = lambda _: None,
    cold: Callable[[Worker], bool] = lambda _: False,
) -> tuple[Worker | None, str]:
    """The spare for a rank: warm before started before starting, then on the node it leaves, then by name.

    A spare that is still starting is taken too: it has a head start over one that is not there. `last`: whether its
    place is to be used last; a warm one there still comes before one that has to start. `apart`: whether the loss of
    its node would leave a replica of what the rank holds; such a one comes before one on the node that it leaves.
    `host`: in whose slot it is a guest; one with a slot of its own comes first, unless it has to start. `cold`: whether
    it starts where nothing was forked from yet; it comes after all others, also after guests.
    """
    order = (Life.WARM, Life.STARTED, Life.STARTING)
    able = [spare for spare in spares if spare.life in order]
    if not able:
        return None, f"no spare for rank {rank}: waiting for one"
    best = min(
        able,
        key=lambda spare: (
            spare.life is not Life.WARM,
            cold(spare),
            host(spare) is not None,
            last(spare),
            order.index(spare.life),
            not apart(spare),
            spare.node != near,
            natural_key(spare.worker),
        ),
    )
    why = ", though its place is to be used last" if last(best) else ""
    other = host(best)
    if other is not None:
        who = other.worker if other.rank is None else f"rank {other.rank}"
        why += f", and shares slot {best.place} with {who}, as no spare is left"
    return best, f"rank {rank} moves to {best.life} spare {best.worker} on {best.node}{why}"


def choose_sources(
    seats: Table[Rank, Seat], rank: Rank, point: Point, *, tried: bool = False, after: Rank | None = None
) -> Iterator[Rank]:
    """Ranks that hold the same shard at `point` and were not found wanting, lowest first, or from `after` on.

    Only who stood there when this generation was agreed on serves its state; a replacement does so from the next one.

    `tried`: who can be asked in the next generation: also those that did not deliver in this one, and replacements that
    were restored in it, though not those whose digest differed.
    """
    seat = seats[rank]
    return (
        other
        for other, candidate in (seats.group(facts.shard_of, seat.shard, after=after) if seat.shard else ())
        if other != rank
        and candidate.holds == point
        and (tried or candidate.serves)
        and other not in seat.distrusted
        and (tried or other not in seat.failed)
    )


def choose_resume_point(seats: Mapping[Rank, Seat], decided: Point | None = None) -> tuple[Point | None, str]:
    """The point from which all go on: the newest that a survivor committed. Roll forward, never back.

    `decided`: where the generation before went. Whoever had committed it may be lost since, on the way there; who was
    in its gate can still roll forward.
    """
    committed = {rank: seat.report.committed for rank, seat in seats.items() if seat.report is not None}
    held = {rank: point for rank, point in committed.items() if point is not None}
    if not held:
        return None, "no survivor holds any state"
    newest = max(held.values())
    reports = [seat.report for seat in seats.values() if seat.report is not None]
    gates = [report.pending for report in reports if report.phase is WorkerPhase.GATE]
    if decided is not None and decided > newest and decided in gates:
        return decided, f"step {decided} was committed by a rank that is lost since: no rank goes back behind it"
    if newest == START:
        return START, "nothing was committed yet: all workers start again"
    first = min(rank for rank, point in held.items() if point == newest)
    return newest, f"step {newest} is committed on rank {first}: no rank goes back behind it"


def judge_report(seat: Seat, point: Point) -> Verdict | None:
    """What a survivor must do to stand at the safepoint after `point`; None if it cannot get there."""
    report = seat.report
    if report is None or report.committed is None:
        return None
    if report.committed == point:
        return Verdict.REDO
    if report.phase is WorkerPhase.GATE and report.pending == point:
        return Verdict.ROLL_FORWARD
    return None


def slot_order(spec: JobSpec, node: NodeId, slot: int) -> tuple[bool, tuple[tuple[bool, int | str], ...], int]:
    """Ranks fill the first nproc_per_node slots of each node; what is beyond them is for spares."""
    return slot >= spec.nproc_per_node, natural_key(node), slot


def is_cordoned(spec: JobSpec, strikes: Sequence[int], now_ms: int) -> bool:
    """A slot that lost its worker too often of late is not used again; 0 faults allowed means no limit."""
    if not spec.refill:
        return bool(strikes)
    if spec.slot_faults == 0:
        return False
    recent = [at for at in strikes if now_ms - at <= spec.slot_window_ms]
    return len(recent) >= spec.slot_faults
