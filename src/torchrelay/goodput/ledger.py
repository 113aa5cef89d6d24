"""Ledger: one line per incident, and what they come to: how many were resolved clean, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from enum import StrEnum
from statistics import median

from msgspec import Struct

from torchrelay.api.shown import SYMPTOM, Exclusion, IncidentView, root_causes
from torchrelay.orchestrator.views.views import ALL_PHASES
from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Rank
from torchrelay.protocol.model.incident import COMES_BACK, UNSETTLED, Resolution
from torchrelay.protocol.recovery.recovery import BEGUN_ANEW

Z95 = 1.959963984540054  # of the normal distribution, for an interval of 95 %


class Line(Struct, frozen=True, kw_only=True):
    """One incident. Spans in ms. `steps_lost` is None where only the script's own checkpoint could tell."""

    id: str
    job: JobId
    generation: Generation
    at: str
    kind: str  # unplanned, planned, or pre-emptive
    move: str  # the move that made it, or that it came into; empty if none
    cause: str  # of the first fault, or of the move; `tried` has the others
    detector: str
    ranks: tuple[Rank, ...]  # whose workers were at fault
    nodes: tuple[NodeId, ...]
    verdict: str
    resume_point: str  # the point from which training went on
    source: str  # where the state came from
    shares: dict[Rank, int]  # how many bytes of its tensors came from which rank
    steps_lost: int | None
    pause_ms: int | None
    phases: dict[str, int]
    bytes: int
    digest: str
    digest_equal: bool | None  # None: nothing was copied
    tried: tuple[str, ...]  # what went wrong on the way: further faults, sources that did not deliver
    resolution: str
    eligible: bool
    story: tuple[str, ...]
    excluded: str = ""  # an `Exclusion`, if it is not eligible
    evidence: str = ""  # what shows that


class Interval(Struct, frozen=True):
    """A share and its 95 % confidence interval."""

    share: float
    low: float
    high: float


class Totals(Struct, frozen=True, kw_only=True):
    """What the lines come to. `clean` counts eligible incidents only; figures in ms over incidents with a pause."""

    incidents: int
    eligible: int
    clean: int
    clean_ratio: Interval | None
    steps_lost: int
    steps_unknown: int  # incidents whose lost steps only the script's checkpoint could tell
    pause_p50_ms: float | None
    pause_max_ms: int | None
    phases_p50_ms: dict[str, float]


def line_of(incident: IncidentView) -> Line:
    """An incident as a line of the ledger."""
    faults = root_causes(incident.faults)
    first = faults[0] if faults else None
    eligible = incident.eligible and incident.resolution != Resolution.CALLED_OFF
    return Line(
        id=incident.name,
        job=incident.job,
        generation=incident.generation,
        at=incident.at,
        kind=incident.kind,
        move=incident.move,
        cause=incident.cause,
        detector="" if first is None else first.detector,
        ranks=tuple(sorted({fault.rank for fault in faults if fault.rank is not None})),
        nodes=tuple(sorted({fault.node for fault in faults if fault.node is not None})),
        verdict=incident.verdict,
        resume_point=incident.resume_point,
        source=source_of(incident),
        shares=incident.shares,
        steps_lost=steps_lost(incident),
        pause_ms=incident.pause_ms,
        phases=incident.phases,
        bytes=incident.bytes,
        digest=incident.digest,
        digest_equal=True if incident.digest else None,
        tried=tried(incident),
        resolution=incident.resolution,
        eligible=eligible,
        story=tuple(told.text for told in incident.story),
        excluded="" if eligible else incident.excluded or untold(incident),
        evidence=incident.evidence,
    )


def untold(incident: IncidentView) -> Exclusion:
    """Why it is not counted, by an orchestrator of an older version, which did not say."""
    return Exclusion.CALLED_OFF if incident.resolution == Resolution.CALLED_OFF else Exclusion.UNTOLD


def source_of(incident: IncidentView) -> str:
    """Where the state came from, in words."""
    if incident.verdict.startswith(BEGUN_ANEW):  # also if no step was lost by that
        return f"snapshots of {incident.resume_point} in the memory of the nodes"
    if incident.verdict.startswith(COMES_BACK):
        return f"the parking after {incident.resume_point}"
    if incident.sources:
        return "rank " + ", ".join(share_text(incident, rank) for rank in incident.sources)
    match Resolution(incident.resolution):
        case Resolution.FELL_BACK:
            return "the script's own checkpoint"
        case Resolution.RESUMED | Resolution.CLEAN | Resolution.CALLED_OFF:
            return "in place"  # nobody had lost anything
        case Resolution.PARKED:
            return "written down"
        case Resolution.ROLLED_BACK | Resolution.OPEN | Resolution.RESTARTED | Resolution.ENDED:
            return ""


def share_text(incident: IncidentView, rank: Rank) -> str:
    """A source, and of several how much of the state is from it."""
    if len(incident.sources) == 1 or rank not in incident.shares:
        return str(rank)
    return f"{rank} ({incident.shares[rank] / max(1, sum(incident.shares.values())):.0%})"


def steps_lost(incident: IncidentView) -> int | None:
    """Committed steps that must be done again: none if clean, or if none was committed yet."""
    match Resolution(incident.resolution):
        case Resolution.RESUMED | Resolution.CLEAN | Resolution.RESTARTED | Resolution.CALLED_OFF | Resolution.PARKED:
            return 0
        case Resolution.ROLLED_BACK:
            return incident.lost
        case Resolution.OPEN | Resolution.FELL_BACK | Resolution.ENDED:
            return None


def tried(incident: IncidentView) -> tuple[str, ...]:
    """What went wrong after the first fault, and besides its symptoms."""
    later = [f"{fault.detector}: {fault.cause}" for fault in root_causes(incident.faults)[1:]]
    return (*later, *(told.text for told in incident.story if "could not" in told.text))


def wilson(clean: int, eligible: int) -> Interval | None:
    """The share of clean ones with its Wilson score interval; None without any incident.

    Right for the few incidents that a run has, where the usual interval around the share is far too narrow.
    """
    if eligible == 0:
        return None
    share, z2 = clean / eligible, Z95 * Z95
    middle = (share + z2 / (2 * eligible)) / (1 + z2 / eligible)
    spread = Z95 * math.sqrt(share * (1 - share) / eligible + z2 / (4 * eligible**2)) / (1 + z2 / eligible)
    # Rounding must not push the share itself out of its interval.
    return Interval(share, max(0.0, min(share, middle - spread)), min(1.0, max(share, middle + spread)))


def total(lines: Sequence[Line], *, live: bool = True) -> Totals:
    """What the lines come to. `live`: their run is, and what is open is not counted yet; else it never ended."""
    eligible = [line for line in lines if line.eligible and not (live and line.resolution in UNSETTLED)]
    clean = [line for line in eligible if line.resolution == Resolution.CLEAN]
    pauses = [line.pause_ms for line in lines if line.pause_ms is not None]
    phases = {}
    for phase in ALL_PHASES:
        spans = [line.phases[phase] for line in clean if phase in line.phases]
        if spans:
            phases[phase] = float(median(spans))
    return Totals(
        incidents=len(lines),
        eligible=len(eligible),
        clean=len(clean),
        clean_ratio=wilson(len(clean), len(eligible)),
        steps_lost=sum(line.steps_lost or 0 for line in lines),
        steps_unknown=sum(line.steps_lost is None for line in eligible),
        pause_p50_ms=float(median(pauses)) if pauses else None,
        pause_max_ms=max(pauses, default=None),
        phases_p50_ms=phases,
    )


# ---------------------------------------------------------------- guarantee

# How many of the interruptions that count were resolved clean, how sure that is, and what was left out.
#
# Interruption: whatever stopped training, or would have. It counts unless it has an `Exclusion`. Clean: no step that
# was committed was lost or made again, and all ranks have committed a further point since. To redo the step that was
# cut short is allowed, and its time is in the pause.

TARGET = 0.90
# Classes of causes by who told of the fault; what is not named here is named by its detector.
BY_DETECTOR = {
    "agent": "workers gone with their node's agent",
    "heartbeat": "node lost",
    "hang": "hang",
    "worker: exception": "exception in the script",
    "worker: undeclared collective": "undeclared collective",
    "comparison of replicas": "replicas differ",
    SYMPTOM: "broken collective",
}


class Verdict(StrEnum):
    """Whether a target is met. By the lower bound it is shown; by the plain share it is missed."""

    MET = "met"
    NOT_YET = "not shown yet"  # the share is high enough, but it are too few to be sure
    MISSED = "missed"  # the share itself is lower


class RatioPart(StrEnum):
    """What an interruption is in the clean ratio."""

    CLEAN = "clean"
    NOT_CLEAN = "not clean"
    EXCLUDED = "excluded"
    PENDING = "pending"  # under way in a run that lives: counted when it is over


class Entry(Struct, frozen=True):
    """A line of a ledger. `origin`: where it was read; `live`: its orchestrator answers, so it may come to its end."""

    line: Line
    origin: str = ""
    live: bool = False


class Finding(Struct, frozen=True, kw_only=True):
    """One interruption and what it counts as. `pause_ms` None: it never went on, or only another worker did.

    lost      of one that is not clean: what
    reason    of one that is excluded: which `Exclusion`
    why       of either: the decision, or the evidence, in the words of the ledger
    """

    standing: RatioPart
    id: str
    job: str
    at: str
    kind: str
    group: str
    cause: str
    resolution: str
    steps_lost: int | None
    pause_ms: int | None
    lost: str = ""
    reason: str = ""
    why: str = ""
    origin: str = ""


class Part(Struct, frozen=True):
    """Those of one kind or one cause."""

    name: str
    counted: int
    clean: int
    ratio: Interval | None


class Guarantee(Struct, frozen=True, kw_only=True):
    """What it comes to. Shares from 0 to 1; intervals are Wilson's, of 95 % confidence.

    more      clean ones in a row, from now on, after which the lower bound would reach the target; 0 if it does
    worst     if each exclusion but a move that was called off, and what is missing, counted and had not been clean
    missing   interruptions whose numbers a ledger skips, each with that ledger: somebody has taken them out
    first     the time of the oldest interruption that was looked at, ISO 8601; empty if there is none
    """

    target: float
    verdict: Verdict
    counted: int
    clean: int
    ratio: Interval | None
    more: int
    worst: Interval | None
    since: str = ""
    first: str = ""
    missing: tuple[str, ...] = ()
    kinds: tuple[Part, ...] = ()
    causes: tuple[Part, ...] = ()
    findings: tuple[Finding, ...] = ()

    def those(self, standing: RatioPart) -> tuple[Finding, ...]:
        """The interruptions that are this, oldest first."""
        return tuple(one for one in self.findings if one.standing is standing)


def guarantee(
    entries: Iterable[Entry], target: float = TARGET, *, since: str = "", missing: Sequence[str] = ()
) -> Guarantee:
    """Judge these interruptions. Raises `ValueError` for a target that is no share between 0 and 1."""
    if not 0 < target < 1:
        raise ValueError(f"a target of {target:g}: give a share between 0 and 1, as 0.9")
    findings = tuple(sorted((find(entry) for entry in entries), key=lambda one: moment_of(one.at)))
    counted = [one for one in findings if one.standing in (RatioPart.CLEAN, RatioPart.NOT_CLEAN)]
    clean = sum(one.standing is RatioPart.CLEAN for one in counted)
    doubtful = [one for one in findings if one.standing is RatioPart.EXCLUDED and one.reason != Exclusion.CALLED_OFF]
    ratio = wilson(clean, len(counted))
    return Guarantee(
        target=target,
        verdict=verdict(ratio, target),
        counted=len(counted),
        clean=clean,
        ratio=ratio,
        more=clean_ones_to_come(clean, len(counted), target),
        worst=wilson(clean, len(counted) + len(doubtful) + len(missing)),
        since=since,
        first=next((one.at for one in findings if one.at), ""),
        missing=tuple(missing),
        kinds=parts(counted, lambda one: one.kind),
        causes=parts(counted, lambda one: one.group),
        findings=findings,
    )


def moment_of(at: str) -> float:
    """A time of the ledger in seconds since 1970; 0 if it is not known."""
    return datetime.fromisoformat(at).timestamp() if at else 0.0


def verdict(ratio: Interval | None, target: float) -> Verdict:
    if ratio is None:
        return Verdict.NOT_YET
    if ratio.low >= target:
        return Verdict.MET
    return Verdict.NOT_YET if ratio.share >= target else Verdict.MISSED


def clean_ones_to_come(clean: int, counted: int, target: float) -> int:
    """The smallest m for which (clean + m) of (counted + m) have a lower bound of `target` or more."""

    def enough(more: int) -> bool:
        ratio = wilson(clean + more, counted + more)
        return ratio is not None and ratio.low >= target

    most = 1
    while not enough(most):  # the bound rises to 1 with each clean one
        most *= 2
    least = -1
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (least, middle) if enough(middle) else (middle, most)
    return most


def parts(counted: Sequence[Finding], name_of: Callable[[Finding], str]) -> tuple[Part, ...]:
    """The counted ones by some name, most frequent first."""
    found: dict[str, list[Finding]] = {}
    for one in counted:
        found.setdefault(name_of(one), []).append(one)
    rows = []
    for name, some in sorted(found.items(), key=lambda item: (-len(item[1]), item[0])):
        clean = sum(one.standing is RatioPart.CLEAN for one in some)
        rows.append(Part(name, len(some), clean, wilson(clean, len(some))))
    return tuple(rows)


# ---------------------------------------------------------------- one interruption


def find(entry: Entry) -> Finding:
    """What one line of a ledger counts as."""
    line = entry.line
    standing = standing_of(entry)
    lost = standing is RatioPart.NOT_CLEAN
    excluded = standing is RatioPart.EXCLUDED
    return Finding(
        standing=standing,
        id=line.id,
        job=line.job,
        at=line.at,
        kind=line.kind,
        group=group_of(line),
        cause=line.cause,
        resolution=line.resolution,
        steps_lost=line.steps_lost,
        pause_ms=line.pause_ms,
        lost=what_was_lost(line) if lost else "",
        reason=(line.excluded or Exclusion.UNTOLD) if excluded else "",
        why=why_lost(line) if lost else (line.evidence or last_words(line)) if excluded else "",
        origin=entry.origin,
    )


def standing_of(entry: Entry) -> RatioPart:
    """An interruption that was never seen to end is not clean, unless its run lives and may end it yet."""
    line = entry.line
    if not line.eligible:
        return RatioPart.EXCLUDED
    if line.resolution in UNSETTLED and entry.live:
        return RatioPart.PENDING
    # That no step was lost follows from the resolution; a ledger that says otherwise is taken at its worst.
    return RatioPart.CLEAN if line.resolution == Resolution.CLEAN and not line.steps_lost else RatioPart.NOT_CLEAN


def group_of(line: Line) -> str:
    """The class of its cause."""
    if line.detector.startswith("move ") or not line.detector:
        return f"{line.kind} move" if line.kind != "unplanned" else "not told"
    if line.detector == "agent: process exit":
        killed = line.cause.startswith(("SIG", "ended by signal"))
        return "process killed by a signal" if killed else "process ended by itself"
    named = BY_DETECTOR.get(line.detector)
    if named is not None:
        return named
    return "too slow in a recovery" if "deadline" in line.detector else line.detector


def what_was_lost(line: Line) -> str:
    """In words."""
    match Resolution(line.resolution):
        case Resolution.ROLLED_BACK:
            return f"{line.steps_lost} steps, made again from snapshots"
        case Resolution.FELL_BACK:
            return "all since the script's own checkpoint"
        case Resolution.RESTARTED:
            return "the start: nothing was committed yet"
        case Resolution.ENDED:
            return "the job ended"
        case Resolution.OPEN:
            return "never seen to end"
        case Resolution.RESUMED:
            return "never proved: nothing was committed after it"
        case Resolution.CLEAN | Resolution.CALLED_OFF | Resolution.PARKED:
            return f"{line.steps_lost} steps"


DECISIVE = {
    Resolution.FELL_BACK: "falls back to",
    Resolution.RESTARTED: "all workers start again",
    Resolution.ENDED: "ends with",
    Resolution.ROLLED_BACK: "all go back to the snapshots",
}


def why_lost(line: Line) -> str:
    """The decision by which it was lost, with its reason."""
    begins = DECISIVE.get(Resolution(line.resolution))
    told = [text for text in line.story if begins is not None and text.startswith(begins)]
    return told[-1] if told else last_words(line)


def last_words(line: Line) -> str:
    """What was said last, but for how it was resolved."""
    told = [text for text in line.story if not text.startswith("resolved:")]
    return told[-1] if told else ""
