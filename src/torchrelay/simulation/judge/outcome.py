"""Outcome: the end of a simulated job, against what the world did to it."""

from __future__ import annotations

from torchrelay.protocol.model.incident import Resolution
from torchrelay.protocol.recovery.ending import NO_SPARE, NO_STATE, REFUSED, STOPPED
from torchrelay.simulation.judge.invariants import MANY_MOVES, Checker
from torchrelay.simulation.model.causes import Cause
from torchrelay.simulation.model.plans import JOB, Lack


def judge(checker: Checker) -> None:
    """The end of the job, against what the world did to it."""
    job = checker.world.shell.cluster.jobs[JOB]
    joined = checker.world.shell.cluster.nodes
    if job.outcome is None and any(each.lost and each.node not in joined for each in checker.world.machines.values()):
        return  # it waits for a node that was lost before it had joined
    if job.outcome is None:
        checker.fail(f"the job has no end: {job.phase} since {job.phase_ms} ms, {job.why}")
        return
    code, reason = job.outcome.code, job.outcome.reason
    if job.moved > MANY_MOVES:
        checker.fail(f"{job.moved} moves were begun: they do not come to rest")
    resolutions = {incident.resolution for incident in job.incidents}
    if Resolution.OPEN in resolutions:
        checker.fail("an incident is left open")
    if not reason or any(not incident.cause for incident in job.incidents):
        checker.fail("an end, or an incident, without a reason")
    if code == 0:
        _judge_success(checker)
    else:
        _judge_failure(checker, code, reason)
    if Resolution.ROLLED_BACK in resolutions and not checker.unheld:
        checker.fail("all went back to a snapshot, and every shard had a holder")
    lost = max(incident.lost for incident in job.incidents) if job.incidents else 0
    if lost > checker.world.plan.snapshots and not checker.node_was_lost:
        checker.fail(f"{lost} steps were made again, with snapshots every {checker.world.plan.snapshots}")
    if Resolution.FELL_BACK in resolutions and not checker.must_lose():
        checker.fail(f"fell back without a cause: {reason}")
    for process in checker.world.processes.values():
        if process.alive and not process.undying and not checker.world.machines[process.node].lost:
            checker.fail(f"{process.id} is left running")


def _judge_success(checker: Checker) -> None:
    for rank in range(checker.world.script.ranks):
        done = [p for p in checker.world.processes.values() if p.rank == rank and p.training.finished]
        end = checker.history.entered[-1][rank]
        if not any(each.training.state == end or checker.spoiled for each in done):
            checker.fail(f"the job ended with 0, and rank {rank} has not finished")
    error = checker.world.script.error
    if error is not None and not checker.causes - {Cause.SCRIPT}:
        checker.fail("the script's own error was trained over")


def _judge_failure(checker: Checker, code: int, reason: str) -> None:
    """Every end but success has a cause in the world, and its code says which."""
    spare_capacity = checker.usable_slots() >= checker.world.script.ranks
    causes = checker.causes
    match code:
        case c if c == NO_SPARE:
            just = Cause.UNDYING in causes or checker.node_was_lost or not spare_capacity
        case c if c == NO_STATE:
            just = bool(causes - {Cause.SCRIPT, Cause.REFUSED, Cause.CANCELLED})
        case c if c == REFUSED:
            just = Cause.REFUSED in causes
        case c if c == STOPPED:
            just = checker.cancelled
        case c if c == checker.world.plan.script_code:
            just = bool(causes & {Cause.SCRIPT, Cause.NEVER_STARTED, Cause.NEVER_CONNECTS, Cause.FROZEN})
        case _:
            just = bool(causes & {Cause.NEVER_STARTED, Cause.NEVER_CONNECTS, Cause.FROZEN})
    if not just:
        checker.fail(f"the job ends with {code} ({reason}); the world knows no cause for it: {sorted(causes)}")
    if code == checker.world.plan.script_code and checker.world.plan.script.error is not None:
        _judge_burnt(checker)


def _judge_burnt(checker: Checker) -> None:
    """On an error of the script no spare is burnt; one that strikes one rank only needs a second opinion."""
    error = checker.world.script.error
    weather = checker.world.plan.weather
    late = weather.reordered or weather.lost or weather.late or Lack.SLOW in checker.world.plan.lacks
    if checker.unheld or checker.struck or late:
        return  # something else has cost a spare (so may being slow), or what was raised is heard too late
    if error is not None and len(checker.replacements) > (0 if error.rank is None else 1):
        checker.fail(f"{len(checker.replacements)} spares were burnt on an error of the script")
