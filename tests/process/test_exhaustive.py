"""Exhaustive: every state of small worlds, every next event, and what must be true of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from tests.support import small_world as small
from tests.support.exhaustive import (
    AGREEING,
    ENDED,
    FINISHING,
    HALTING,
    RECONFIGURING,
    RESUMING,
    RUNNING,
    explore,
    from_the_start,
)
from tests.support.telling import JOB, Stand, answers
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages.ids import Generation, Point, Rank, WorkerId, WorkerPhase
from torchrelay.protocol.model.job import BEFORE_CUTOVER
from torchrelay.protocol.model.moves import MoveState
from torchrelay.protocol.model.state import seat_of
from torchrelay.protocol.rules.cluster import Cluster, advance, orders


def test_one_recovery_in_every_order_of_things() -> None:
    assert explore(small.beginning(), last_generation=2, limit=3_000) > 500


def test_a_start_in_every_order_of_things() -> None:
    assert explore(from_the_start(), last_generation=1, limit=3_000) > 100


def check_move_quiet(state: Cluster) -> None:
    """When faults cease, every move is made, given up or waits for room, and the job trains or ends."""
    cluster, now = state, 0
    for _ in range(60):
        for order in sorted(orders(cluster), key=repr):
            for event in answers(order, {name: standing_of(cluster, name) for name in cluster.workers}):
                cluster = advance(cluster, event, now)
        job = cluster.jobs[JOB]
        waits = job.open_move is None or job.open_move.state is MoveState.WAITING
        ends = job.phase in (FINISHING, ENDED) or any(seat.finished for seat in job.seats.values())
        if ends or (job.phase is RUNNING and waits):
            return
        now += 1_000
        cluster = advance(cluster, ev.Tick(), now + (small.LONG_MS if now > 30_000 else 0))
    raise AssertionError(f"it stays {cluster.jobs[JOB].phase} for ever: {cluster.jobs[JOB].moving.moves[-1:]}")


def standing_of(cluster: Cluster, name: WorkerId) -> Stand:
    """Where a worker may stand that was healthy so far."""
    job, found = cluster.jobs[JOB], seat_of(cluster, name)
    seat = None if found is None else job.seats[found[1]]
    if seat is None or seat.replacement:
        return Stand() if job.resume_point is None or seat is None else Stand(caught_up=job.resume_point)
    there = small.NEXT in (job.resume_point, job.boundary if seat.ready else None)
    return Stand(small.NEXT, WorkerPhase.STOPPED) if there else Stand(small.HERE, WorkerPhase.GATE, small.NEXT)


class NowAndThen:
    """A check of every n-th state: it takes longer than all others together."""

    def __init__(self, check: Callable[[Cluster], None], nth: int) -> None:
        self._check, self._nth, self._count = check, nth, 0

    def __call__(self, state: Cluster) -> None:
        self._count += 1
        if self._count % self._nth == 0:
            self._check(state)


def explore_the_way_to_the_boundary() -> int:
    """From the halt to the boundary, with all that can call it off; recoveries that follow are looked at once only."""
    return explore(
        small.beginning_of_a_halt(),
        last_generation=2,
        limit=5_000,
        quiet=NowAndThen(check_move_quiet, 20),
        alphabet=small.happenings_of_a_move,
        phases=BEFORE_CUTOVER,
    )


def explore_a_cutover() -> int:
    """From the boundary to training on, in the new roster."""
    return explore(
        small.beginning_of_a_cutover(spares=1),
        last_generation=3,
        limit=5_000,
        quiet=NowAndThen(check_move_quiet, 20),
        alphabet=small.happenings_of_a_move,
        phases=(HALTING, RECONFIGURING, RESUMING),
    )


def test_one_move_up_to_the_boundary_in_every_order_of_things() -> None:
    assert explore_the_way_to_the_boundary() > 300


def test_one_cutover_in_every_order_of_things() -> None:
    assert explore_a_cutover() > 40


def test_one_move_from_the_halt_to_its_end_in_every_order_of_things() -> None:
    world: dict[str, Any] = {"alphabet": small.happenings_of_a_move, "quiet": NowAndThen(check_move_quiet, 50)}
    phases = (*BEFORE_CUTOVER, RECONFIGURING, RESUMING)
    assert explore(small.beginning_of_a_halt(), last_generation=3, limit=5_000, phases=phases, **world) > 1_000


def test_faults_after_a_cutover_in_every_order_of_things() -> None:
    world: dict[str, Any] = {"alphabet": small.happenings_of_a_move, "quiet": NowAndThen(check_move_quiet, 50)}
    phases = (HALTING, RECONFIGURING, RESUMING, AGREEING)
    start = small.beginning_of_a_cutover(spares=1)
    assert explore(start, last_generation=4, limit=5_000, phases=phases, **world) > 100


def test_a_second_fault_in_every_order_of_things() -> None:
    assert explore(small.beginning(), last_generation=3, limit=30_000, quiet=lambda _: None) > 3_000


def test_a_state_is_told_from_another_by_what_matters() -> None:
    """The folding must not make different states equal."""
    start = small.beginning()
    job = start.jobs[JOB]
    seat = job.seats[Rank(0)]
    for other in (
        replace(job, resume_point=Point(2)),
        replace(job, generation=Generation(7)),
        job.with_seat(Rank(0), replace(seat, finished=True)),
    ):
        assert small.folded(start.with_job(other)) != start
