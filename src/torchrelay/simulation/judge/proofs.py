"""Proofs: an incident is clean only when all ranks have committed a point after the one from which they went on."""

from __future__ import annotations

from torchrelay.protocol.messages.ids import START, Point, Rank
from torchrelay.protocol.model.incident import UNSETTLED, Resolution
from torchrelay.protocol.model.job import Job
from torchrelay.simulation.judge.violation import Violation
from torchrelay.simulation.scene import Scene


def check_proofs(world: Scene, was: Job, now: Job) -> None:
    """What an event has made clean, against what the ranks have done."""
    for before, after in zip(was.incidents, now.incidents, strict=False):
        if before.resolution is after.resolution or after.resolution is not Resolution.CLEAN:
            continue
        world.seen(f"resolution: {after.resolution}")
        points = [furthest(world, rank) for rank in now.seats]
        # From open to clean at once: all scripts had ended by the time when it was heard that all had gone on.
        if before.resolution not in UNSETTLED or min(points) <= after.since:
            raise Violation(f"{after.name} is called clean, and ranks have come to {points} from {after.since}")
    told = sum(incident.resolution is Resolution.RESUMED for incident in now.incidents)
    if now.unproved > told or (now.unproved < told and not now.restarts and now.trained):
        raise Violation(f"{now.unproved} incidents are to be proved, and {told} are not")


def furthest(world: Scene, rank: Rank) -> Point:
    """The last point that anybody has committed as this rank."""
    every = [each.training.committed for each in world.processes.values() if each.rank == rank]
    return max((point for point in every if point is not None), default=START)
