"""Hangs in layouts of several groups: found at the rank that all wait for, and only there."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.support.failure_detector import RANKS, Ward, ahead, evidence, pulse
from torchrelay.protocol.health.pulses import BEAT_MS, feel
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages.ids import Point, Rank, WorkerPhase

# A mesh of two by two: rows are ranks 0 and 1, 2 and 3; columns ranks 0 and 2, 1 and 3.
KEYS = {0: (11, 13), 1: (11, 14), 2: (12, 13), 3: (12, 14)}
# Rank 3 has not come to its row's collective; rank 2 waits there, rank 0 for rank 2 in a column, rank 1 for rank 0.
KEPT = {0: (7, 4), 1: (8, 3), 2: (7, 3), 3: (6, 3)}


@dataclass
class Mesh(Ward):
    """Ranks that communicate in rows and columns. Groups are told every eighth beat, to who stands still."""

    beats: int = 0

    def blocked(self) -> None:
        """All wait, in the end, for rank 3."""
        for rank, begun in KEPT.items():
            self.set(rank, groups=tuple(zip(KEYS[rank], begun, strict=True)), elsewhere=sum(begun))

    def live(self, ms: int, *, busy: tuple[int, ...] = ()) -> list[ev.Event]:
        told = {rank: sample.groups for rank, sample in self.samples.items()}
        for _ in range(ms // BEAT_MS):
            for rank in range(RANKS):
                self.set(rank, groups=told[Rank(rank)] if self.beats % 8 == 0 else None)
            self.beats += 1
            super().live(BEAT_MS, busy=busy)
        for rank in range(RANKS):
            self.set(rank, groups=told[Rank(rank)])
        return self.alarms

    @property
    def found(self) -> set[int]:
        workers = {event.worker for event in self.alarms if isinstance(event, ev.WorkerHung)}
        return {int(rank) for rank, sample in self.samples.items() if sample.worker in workers}


def test_the_rank_that_all_wait_for_in_the_end_is_found_when_twenty_steps_have_passed() -> None:
    mesh = Mesh()
    mesh.step(1_000)
    mesh.blocked()
    mesh.live(19_000)
    assert mesh.found == set()
    mesh.live(3_000)
    assert mesh.found == {3}
    hung = mesh.alarms[0]
    assert isinstance(hung, ev.WorkerHung)
    assert (
        hung.evidence
        == "standing still for 20.0 s while rank 2 waits for it in a group of ranks 2, 3 (patience 20.0 s)"
    )


def test_one_that_spins_is_found_too_but_later_whoever_spins_while_it_waits() -> None:
    mesh = Mesh()
    mesh.step()
    mesh.blocked()
    mesh.live(119_000, busy=(0, 2, 3))
    assert mesh.found == set()
    mesh.live(2_000, busy=(0, 2, 3))
    assert mesh.found == {3}


@pytest.mark.parametrize("alive", ["in a section", "moving", "slow", "before the first commit", "between steps"])
def test_nobody_is_found_while_all_wait_for_one_that_is_well(alive: str) -> None:
    mesh = Mesh()
    mesh.step()
    mesh.blocked()
    if alive == "in a section":
        for rank in range(RANKS):
            mesh.set(rank, phase=WorkerPhase.SECTION)
    elif alive == "slow":
        mesh.set(3, step_ms=100_000.0)
    elif alive == "before the first commit":
        for rank in range(RANKS):
            mesh.set(rank, point=Point(0), step_ms=0.0)
    elif alive == "between steps":
        mesh.set(3, phase=WorkerPhase.BETWEEN)
    for beat in range(120):
        if alive == "moving":  # in a group that it shares with nobody who waits
            mesh.set(3, elsewhere=100 + beat // 8)
        mesh.live(4 * BEAT_MS, busy=(3,))
    assert mesh.alarms == []


def test_a_group_of_some_ranks_alone_makes_nobody_hang() -> None:
    mesh = Mesh()
    mesh.step()
    # Ranks 0 and 1 save for half an hour, with collectives of their own; the others wait in the next step.
    for rank in range(RANKS):
        saving = rank < 2
        mesh.set(rank, groups=((15, 900),) if saving else (), elsewhere=900 if saving else 0)
    mesh.wait_for(0, phase=WorkerPhase.BETWEEN)
    mesh.set(1, collectives=mesh.samples[Rank(0)].collectives, phase=WorkerPhase.BETWEEN)
    mesh.live(1_700_000)
    assert mesh.alarms == []


def test_of_one_that_is_stopped_it_does_not_matter_whom_it_waits_for() -> None:
    mesh = Mesh()
    mesh.step()
    mesh.blocked()
    mesh.set(2, process="T")
    for beat in range(20):
        mesh.set(3, elsewhere=100 + beat)  # it goes on, so not all stand still
        mesh.live(BEAT_MS)
    assert mesh.found == {2}


def test_without_knowing_of_all_nobody_is_found_but_who_has_used_the_default_group_alone() -> None:
    told = ((11, 3), (13, 2))
    for one, found in ((pulse(still=20_000, groups=told, elsewhere=5), False), (pulse(still=20_000), True)):
        assert bool(evidence(one, ahead(0, still=20_000))) == found
    everybody = [ahead(rank, still=20_000, groups=()) for rank in (0, 2, 3)]
    assert evidence(pulse(still=20_000, groups=told, elsewhere=5), *everybody) != ""
    assert evidence(pulse(still=20_000, groups=told, elsewhere=5), *everybody[1:], ahead(0, still=20_000)) == ""


def test_groups_that_were_told_hold_until_the_worker_moves() -> None:
    told = ((11, 3),)
    before = pulse(still=5_000, groups=told, elsewhere=3)
    kept = feel(before, pulse(elsewhere=3).sample, 10_000_000)
    assert (kept.sample.groups, kept.still_ms) == (told, before.still_ms)
    moved = feel(before, pulse(elsewhere=4).sample, 10_000_000)
    assert (moved.sample.groups, moved.still_ms) == (None, 10_000_000)
    assert feel(before, pulse(elsewhere=3, groups=()).sample, 10_000_000).sample.groups == ()
