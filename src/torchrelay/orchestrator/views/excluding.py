"""Excluding: which incidents do not count in the clean ratio, each with its reason and the evidence.

Counted is whatever stopped training, or would have, unless it is shown to be one of these. Without evidence it counts.
"""

from __future__ import annotations

import re

from msgspec import Struct

from torchrelay.api.shown import Exclusion, causes
from torchrelay.protocol.messages.ids import WorkerId
from torchrelay.protocol.model.deaths import Death
from torchrelay.protocol.model.incident import Fault, Incident, Mark, Resolution
from torchrelay.protocol.model.job import Job, Outcome, Raised
from torchrelay.protocol.recovery.ending import REFUSED, STOPPED

RAISED = "worker: exception"  # the detector of a process that ended after it had told of an exception
OWN_ERROR = "the script's own error"
# What the operating system says of a storage that is away, full or broken, as Python words it: EIO, ENOSPC, EROFS,
# ESTALE, EREMOTEIO, EDQUOT. Only of an OSError with its number: other words may be about anything.
STORAGE = re.compile(r"\[Errno (5|28|30|116|121|122)\] ")
MEMORY = "/dev/shm/"  # a folder in memory, full of the script's own samples: no storage


class Excluded(Struct, frozen=True):
    """Why one is not counted, and what shows it."""

    reason: Exclusion
    evidence: str


def exclusion(incident: Incident, job: Job) -> Excluded | None:
    """Why an incident is not counted; None if it is.

    What ended the job is judged by how it ended. What was resolved is a user's bug, too, if another worker has raised
    the same exception at the same point later, and that has ended the job: so the first was no fault of a machine.
    """
    first = first_cause(incident)
    if incident.resolution is Resolution.CALLED_OFF:
        return Excluded(Exclusion.CALLED_OFF, why_called_off(incident))
    if first is not None and first.detector == RAISED:
        if is_storage(first.cause):
            return Excluded(Exclusion.STORAGE, f"rank {first.rank} on {first.node}: {first.cause}")
        again = raised_again(job, first.worker)
        if again is not None and incident.eligible:
            told = f"{first.cause}; rank {again.rank} ({again.worker}) raised the same there, and the job ended"
            return Excluded(Exclusion.USER_BUG, told)
    if first is not None and incident.eligible:
        died = died_again(job, first.worker)
        if died is not None:
            told = f"{first.cause}; rank {died.rank} ({died.worker}) ended alike there, and the job ended"
            return Excluded(Exclusion.USER_BUG, told)
    if not incident.eligible:
        return of_the_end(incident, job.outcome)
    if incident.resolution is Resolution.RESUMED and job.outcome is not None:
        return unproved(incident, job.outcome)
    return None


def of_the_end(incident: Incident, outcome: Outcome | None) -> Excluded:
    """Of an incident that the core does not count: who or what ended the job, and how long after the fault.

    A stop that comes late may have been for the fault's sake, so that a reader is to see it.
    """
    first = first_cause(incident)
    if outcome is None:  # not with a journal of ours
        return Excluded(Exclusion.UNTOLD, last_words(incident))
    told = f"the job ended with {outcome.code}: {outcome.reason}"
    own = outcome.reason.startswith(OWN_ERROR)
    if first is not None and not (own and first.detector == RAISED):
        told += f"; it had begun{since(incident)} with: {first.cause}"
    if own:
        return Excluded(Exclusion.USER_BUG, told)
    reasons = {REFUSED: Exclusion.REFUSED, STOPPED: Exclusion.OPERATOR}
    return Excluded(reasons.get(outcome.code, Exclusion.UNTOLD), told)


def unproved(incident: Incident, outcome: Outcome) -> Excluded | None:
    """Of an incident after which all went on, and the job ended before anything was committed: None if that counts."""
    told = f"all went on after {incident.since}, and nothing was committed before the job ended with {outcome.code}"
    reasons = {0: Exclusion.UNPROVED, REFUSED: Exclusion.REFUSED, STOPPED: Exclusion.OPERATOR}
    reason = reasons.get(outcome.code)
    return None if reason is None else Excluded(reason, f"{told}: {outcome.reason}")


def since(incident: Incident) -> str:
    """How long before its end an incident had begun."""
    begun = incident.marks.get(Mark.FAULT, incident.marks.get(Mark.HEARD))
    if begun is None or not incident.story:
        return ""
    return f" {(incident.story[-1][0] - begun) / 1000:.1f} s before"


def is_storage(text: str) -> bool:
    """Whether an exception's words are those of the operating system for a storage that fails."""
    return STORAGE.search(text) is not None and MEMORY not in text


def raised_again(job: Job, worker: WorkerId | None) -> Raised | None:
    """Who has raised the same as this worker, at the same point, if the script's own error has ended the job."""
    if job.outcome is None or not job.outcome.reason.startswith(OWN_ERROR):
        return None
    mine = [one for one in job.raised if one.worker == worker and not one.cramped]
    for one in mine:
        for other in job.raised:
            same = (one.signature, one.point) == (other.signature, other.point)
            if same and other.worker != worker and not other.cramped:
                return other
    return None


def died_again(job: Job, worker: WorkerId | None) -> Death | None:
    """Who has ended like this worker, later at the same point, if that has ended the job."""
    if job.outcome is None or not job.outcome.reason.startswith(OWN_ERROR):
        return None
    mine = [death for death in job.deaths if death.worker == worker]
    return next((other for one in mine for other in job.deaths if one.same(other)), None)


def first_cause(incident: Incident) -> Fault | None:
    """What went wrong first, symptoms of it left out; None of a move."""
    faults = causes(incident.faults)
    return faults[0] if faults else None


def why_called_off(incident: Incident) -> str:
    told = [text for _, text in incident.story if text.startswith("called off")]
    return told[-1] if told else last_words(incident) or "the move did not take place"


def last_words(incident: Incident) -> str:
    """What was said last, but for how it was resolved."""
    told = [text for _, text in incident.story if not text.startswith("resolved:")]
    return told[-1] if told else ""
