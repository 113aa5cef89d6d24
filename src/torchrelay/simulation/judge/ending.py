"""Ending: how a job has ended, judged by what the world did to it."""

from __future__ import annotations

from torchrelay.protocol.model.incident import Resolution
from torchrelay.protocol.model.job import Job
from torchrelay.protocol.recovery.ending import NO_SPARE, NO_STATE, PARKED, REFUSED, STOPPED
from torchrelay.protocol.succession.succession import is_majority
from torchrelay.simulation.judge.invariants import MANY_MOVES, Checker
from torchrelay.simulation.machine.court import Court
from torchrelay.simulation.model.causes import Cause
from torchrelay.simulation.model.plans import JOB, Lack
from torchrelay.simulation.scene import Scene
from torchrelay.simulation.worker.training import EXIT_CODE


def judge(checker: Checker) -> None:
    """The end of the job, against what the world did to it."""
    job = checker.world.shell.cluster.jobs[JOB]
    if job.outcome is None:
        judge_no_end(checker, job)
        return
    code, reason = job.outcome.code, job.outcome.reason
    if job.moving.named > MANY_MOVES:
        checker.fail(f"{job.moving.named} moves were begun: they do not come to rest")
    resolutions = {incident.resolution for incident in job.accounting.incidents}
    if Resolution.OPEN in resolutions:
        checker.fail("an incident is left open")
    if not reason or any(not incident.cause for incident in job.accounting.incidents):
        checker.fail("an end, or an incident, without a reason")
    if code == 0:
        _judge_success(checker)
    else:
        _judge_failure(checker, code, reason)
    if Resolution.ROLLED_BACK in resolutions and not checker.may_roll:
        checker.fail("all went back to a snapshot, and nothing was lost")
    lost = max(incident.lost for incident in job.accounting.incidents) if job.accounting.incidents else 0
    away = checker.node_was_lost or Lack.SLOTS in checker.world.plan.lacks  # newer ones may lie where no worker may be
    if lost > checker.world.plan.snapshots and not away:
        checker.fail(f"{lost} steps were made again, with snapshots every {checker.world.plan.snapshots}")
    if Resolution.FELL_BACK in resolutions and not checker.must_lose():
        checker.fail(f"fell back without a cause: {reason}")
    for process in checker.world.left_running():
        court = checker.world.court
        found = court is None or court.can_find(process.node, court.acting.office)
        if found and (court is None or may_go_on(checker.world, court)):
            checker.fail(f"{process.id} is left running")
        checker.world.seen("an agent cannot find the head")


def judge_no_end(checker: Checker, job: Job) -> None:
    """There is none: then nobody could make one."""
    world = checker.world
    if any(each.lost and each.node not in world.shell.cluster.nodes for each in world.machines.values()):
        return  # it waits for a node that was lost before it had joined
    if world.court is None or may_go_on(world, world.court):
        checker.fail(f"the job has no end: {job.phase} since {job.phase_ms} ms, {job.why}")
    judge_without_head(checker)


def may_go_on(world: Scene, court: Court) -> bool:
    """Whether a copy lives that counts under all that may be settled, and a majority of the voters of each of that."""
    living = [machine.node for machine in world.machines.values() if machine.agent is not None]
    memories = [court.memory_of(node) for node in living]
    told = [one.ballot.noted for one in memories if one.ballot.noted is not None]
    known = [one for one in (*told, *(office.known for office in court.offices.values())) if one.base is None]
    settled = world.reigns.settled({one.voter for one in memories}, (court.first, *known))
    newer = world.reigns.newer(settled.order)
    groups = [settled.voters, *(group for one in newer for group in one.groups)]
    for office in court.offices.values():
        whole = all(one.has_copy(office.place.copy) for one in (settled, *newer))
        voters = {court.memory_of(node).voter for node in living if court.can_find(node, office)}
        if office.up and whole and all(is_majority(voters, group) for group in groups):
            return True
    return False


def judge_without_head(checker: Checker) -> None:
    """Who needs nobody has trained to the end, and who needs an orchestrator has lost its patience."""
    processes = [each for each in checker.world.processes.values() if not checker.world.machines[each.node].lost]
    for process in processes:
        if process.waits_for_orders:
            checker.fail(f"{process.id} waits for orders for ever")
    sound = [each.training for each in checker.sound() if each.training.resumed and not each.training.interrupted]
    if {training.rank for training in sound} == set(range(checker.world.script.ranks)):
        for training in sound:
            if not training.finished:
                checker.fail(f"rank {training.rank} needs nobody, and has not finished")
    checker.world.seen("nobody acts any more")


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
            just = bool(causes - {Cause.SCRIPT, Cause.TWICE, Cause.REFUSED, Cause.CANCELLED})
            just = just or (Cause.SCRIPT in causes and checker.node_was_lost)  # with a rank that had not said so yet
            late = checker.struck or Lack.SLOW in checker.world.plan.lacks
            just = just or (checker.world.plan.apart and late)  # a rank's file is where no rank is any more, or yet
        case c if c == REFUSED:
            just = Cause.REFUSED in causes
        case c if c == STOPPED:
            just = checker.cancelled
        case c if c == PARKED:
            just = checker.world.whole
        case c if c == checker.world.plan.script_code:
            just = bool(causes & {Cause.SCRIPT, Cause.NEVER_STARTED, Cause.NEVER_CONNECTS, Cause.FROZEN})
        case c if c == EXIT_CODE and Cause.TWICE in causes:
            just = True
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
    if checker.unheld or checker.struck or late or checker.world.plan.spec.resumes is not None:
        return  # something else has cost a spare (so may being slow), or what was raised is heard too late
    if error is not None and len(checker.replacements) > (0 if error.rank is None else 1):
        checker.fail(f"{len(checker.replacements)} spares were burnt on an error of the script")
