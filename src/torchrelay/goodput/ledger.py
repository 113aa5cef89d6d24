"""Ledger: one line per incident, and what they come to: how many were resolved clean, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from msgspec import Struct

from torchrelay.api.shown import Exclusion, IncidentView, causes
from torchrelay.orchestrator.views.views import ALL_PHASES
from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Rank
from torchrelay.protocol.model.incident import UNSETTLED, Resolution
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
    target: str  # the point from which training went on
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
    faults = causes(incident.faults)
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
        target=incident.target,
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
        return f"snapshots of {incident.target} in the memory of the nodes"
    if incident.sources:
        return "rank " + ", ".join(share_text(incident, rank) for rank in incident.sources)
    match Resolution(incident.resolution):
        case Resolution.FELL_BACK:
            return "the script's own checkpoint"
        case Resolution.RESUMED | Resolution.CLEAN | Resolution.CALLED_OFF:
            return "in place"  # nobody had lost anything
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
        case Resolution.RESUMED | Resolution.CLEAN | Resolution.RESTARTED | Resolution.CALLED_OFF:
            return 0
        case Resolution.ROLLED_BACK:
            return incident.lost
        case Resolution.OPEN | Resolution.FELL_BACK | Resolution.ENDED:
            return None


def tried(incident: IncidentView) -> tuple[str, ...]:
    """What went wrong after the first fault, and besides its symptoms."""
    later = [f"{fault.detector}: {fault.cause}" for fault in causes(incident.faults)[1:]]
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
