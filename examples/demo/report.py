"""Report: what the demonstration found, for people as a table and for machines as JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table
from rich.text import Text

from examples.demo.bits import Comparison, Trace, pause_after
from torchrelay.chaos.story import Story, Strike

# The strike that an incident follows is at most this much older (a hang is found after seconds), or younger by the
# difference of two clocks' roundings.
FOUND_WITHIN_S = 60.0
ROUNDING_S = 0.5


class Struck(msgspec.Struct, frozen=True):
    """A strike that was carried out: the step the job was at, and the time in seconds since the epoch."""

    strike: Strike
    step: int
    at: float
    ranks: tuple[int, ...]


class IncidentLine(msgspec.Struct, frozen=True, kw_only=True):
    """An incident as the ledger has it, and the strike that caused it. `pause_s` is what the script saw."""

    name: str
    fault: str  # the strike in words; empty if we did not cause it
    kind: str  # unplanned, planned, pre-emptive
    cause: str
    detector: str
    ranks: tuple[int, ...]
    verdict: str
    resolution: str
    steps_lost: int
    phases_ms: dict[str, float]
    pause_s: float | None
    step: int
    struck: float | None


def match(
    lines: Sequence[dict[str, Any]], strikes: Sequence[Struck], trace: Trace, step_s: float
) -> list[IncidentLine]:
    """Put the ledger's lines and the strikes together, in order of time."""
    left = list(strikes)
    found = []
    for line in lines:
        ranks = tuple(sorted(line["ranks"]))
        at = datetime.fromisoformat(line["at"]).timestamp()
        cause = next((struck for struck in left if explains(struck, ranks, at)), None)
        if cause is not None:
            left.remove(cause)
        found.append(
            IncidentLine(
                name=line["id"],
                fault=str(cause.strike.fault) if cause else "",
                kind=line["kind"],
                cause=line["cause"],
                detector=line["detector"],
                ranks=ranks,
                verdict=line["verdict"],
                resolution=line["resolution"],
                steps_lost=line["steps_lost"] or 0,
                phases_ms=line["phases"],
                pause_s=pause_after(trace, cause.at, max(at, cause.at) + spent_s(line), step_s) if cause else None,
                step=cause.step if cause else 0,
                struck=cause.at if cause else None,
            )
        )
    return found


def spent_s(line: dict[str, Any]) -> float:
    """How long the ledger says that it took, from when it was noticed."""
    return float(sum(line["phases"].values())) / 1000


def explains(struck: Struck, ranks: Sequence[int], at: float) -> bool:
    """Whether this strike can be what the incident, first noticed at `at`, is about."""
    whom = set(struck.ranks) <= set(ranks) and struck.strike.interrupts
    return whom and -ROUNDING_S <= at - struck.at <= FOUND_WITHIN_S


def tables_of(incidents: Sequence[IncidentLine]) -> Iterator[Table]:
    """The incidents for people: what happened, and how long it took."""
    what = Table(title="incidents", title_justify="left")
    for heading in ("", "struck by", "kind", "rank", "cause", "detector", "verdict", "steps lost", "resolved"):
        what.add_column(heading, overflow="fold")
    phases = list(dict.fromkeys(phase for one in incidents for phase in one.phases_ms))
    times = Table(title="phases, ms; the pause is what the script saw of it", title_justify="left")
    for heading in ("", *phases, "pause, s"):
        times.add_column(heading, justify="right")
    for one in incidents:
        ranks = ",".join(map(str, one.ranks))
        cells = (
            one.name,
            one.fault,
            one.kind,
            ranks,
            one.cause,
            one.detector,
            one.verdict,
            one.steps_lost,
            one.resolution,
        )
        what.add_row(*(Text(str(cell)) for cell in cells))
        spans = [f"{one.phases_ms[phase]:.0f}" if phase in one.phases_ms else "" for phase in phases]
        times.add_row(one.name, *spans, "" if one.pause_s is None else f"{one.pause_s:.2f}")
    yield what
    yield times


def machine() -> dict[str, Any]:
    """What the figures were made on."""
    return {
        "cpus": os.cpu_count(),
        "processor": processor(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "torchrelay": version("torchrelay"),
    }


def processor() -> str:
    """The processor's name where the system tells it."""
    try:
        told = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in told.splitlines() if line.startswith("model name")), "")


def shortfalls(
    comparison: Comparison, incidents: Sequence[IncidentLine], story: Story, codes: Sequence[int]
) -> list[str]:
    """Why the demonstration has failed; empty if it has not."""
    told = list(comparison.differences[:10])
    if not comparison.bit_equal and not told:
        told.append("there was nothing to compare")
    told += [f"a run ended with {code}" for code in codes if code != 0]
    told += [f"{one.name} was not resolved clean: {one.resolution}" for one in incidents if one.resolution != "clean"]
    caused = [one for one in incidents if one.fault]
    strikes = sum(one.interrupts for one in story.strikes[: story.told])
    if len(caused) < strikes:
        told.append(f"{strikes} strikes, but only {len(caused)} of them are in the ledger")
    return told


def write(path: Path, comparison: Comparison, incidents: Sequence[IncidentLine], **more: Any) -> None:
    """Write demo-report.json."""
    pauses = [one.pause_s for one in incidents if one.pause_s is not None]
    report = {
        "bit_equal": comparison.bit_equal,
        "compared": {
            "digests": comparison.digests,
            "losses": comparison.losses,
            "parameters": comparison.parameters,
        },
        "differences": comparison.differences[:100],
        "steps_lost": sum(one.steps_lost for one in incidents),
        "causes": sorted({one.fault for one in incidents if one.fault}),
        "incidents": [msgspec.to_builtins(one) for one in incidents],
        "pauses_s": [round(pause, 3) for pause in pauses],
        **more,
        "machine": machine(),
    }
    path.write_text(json.dumps(report, indent=1) + "\n")
