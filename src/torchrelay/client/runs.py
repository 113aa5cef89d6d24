"""Runs: finds a run's folder, and looks at it through its orchestrator or, when that is away, through its journal."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple, Protocol

from torchrelay.api.endpoint import JOURNAL
from torchrelay.api.shown import (
    LONGEST_MS,
    Audit,
    Incidents,
    IncidentView,
    JobStatus,
    Moves,
    Nodes,
    Ranks,
    Spares,
    Status,
    WhyView,
)
from torchrelay.client.client import Away, Client

LAUNCH = "job.json"  # see wire.launch, which is not needed to look at a run
FOLDER = Path("torchrelay-runs")
UNITS = {"": 1_000, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


class NotPossible(Exception):
    """The command cannot be carried out: why, and what to do. `code` is the exit code."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class Far(NamedTuple):
    """A run that is looked at from another machine: its orchestrator's URL, and a copy of one of the run's passes."""

    url: str
    held: Path


class Source(Protocol):
    """Whoever can tell of a run's jobs: its orchestrator (`Client`), or its journal (`Chronicle`)."""

    def job(self, job: str | None = None) -> JobStatus: ...

    def view_ranks(self, job: str | None = None) -> Ranks: ...

    def view_incidents(self, job: str | None = None) -> Incidents: ...

    def view_nodes(self) -> Nodes: ...

    def view_spares(self, job: str | None = None) -> Spares: ...

    def view_moves(self, job: str | None = None) -> Moves: ...

    def view_why(self, about: str, job: str | None = None) -> WhyView: ...

    def view_audit(self) -> Audit: ...


def find_run(run_dir: Path | Far | None) -> Path:
    """The run's folder: the one named, or the newest under ./torchrelay-runs. Raises `NotPossible`."""
    if isinstance(run_dir, Far):
        raise NotPossible("this needs the run's folder: do it on the launcher's machine, with --run-dir for --url", 2)
    if run_dir is not None:
        if (run_dir / JOURNAL).exists():
            return run_dir
        raise NotPossible(f"{run_dir} is not a run's folder (no {JOURNAL} in it): name one with --run-dir", 2)
    runs = [journal.parent for journal in FOLDER.glob(f"*/{JOURNAL}")]
    if not runs:
        raise NotPossible(f"no run under ./{FOLDER}: start one with `torchrelay run`, or name one with --run-dir", 2)
    return max(runs, key=begun)


def begun(run_dir: Path) -> float:
    """When a run was begun: what to run is written once. (Its journal's files change when somebody reads them.)"""
    launch = run_dir / LAUNCH
    return (launch if launch.exists() else run_dir / JOURNAL).stat().st_mtime


def find_source(run_dir: Path | Far | None) -> tuple[Source, str]:
    """Who can tell of this run, and a remark if not all is well with it. Raises `NotPossible`, `Denied`, TrustError."""
    if isinstance(run_dir, Far):
        return from_afar(run_dir)
    found = find_run(run_dir)
    try:
        client = Client.of(found)
        return client, remark_of(client.view_status())
    except Away:
        from torchrelay.client.chronicle import Chronicle  # replaying needs the whole protocol: only now

        chronicle = Chronicle.of(found)
        return chronicle, chronicle.remark


def from_afar(run: Far) -> tuple[Client, str]:
    """An orchestrator on another machine. Raises `NotPossible`, `Denied`, TrustError."""
    client = Client.at(run.url, run.held)
    try:
        return client, remark_of(client.view_status())
    except Away as error:
        raise NotPossible(
            f"{error}. Its journal is on its own machine: ask there, with --run-dir; "
            "another node may act in its place: `torchrelay attach` finds it"
        ) from error


def remark_of(status: Status) -> str:
    """What is not well, or had better be otherwise; empty if all is well."""
    degraded = (f"the orchestrator is degraded: {status.degraded}",) if status.degraded else ()
    return "; ".join((*degraded, *status.remarks))


def find_incident(source: Source, name: str, job: str | None) -> IncidentView:
    """One incident: `I-3`, or just `3`. Raises `NotPossible`."""
    wanted = name if name.startswith("I-") else f"I-{name}"
    found = source.view_incidents(job)
    for incident in found.incidents:
        if incident.name == wanted:
            return incident
    known = ", ".join(incident.name for incident in found.incidents) or "none so far"
    raise NotPossible(f"no incident {name!r} in job {found.job}; there are: {known}", 2)


def time_in(text: str) -> int:
    """A time in ms: 90, 90s, 10m, 2h, 1d. Raises `NotPossible`."""
    found = re.fullmatch(r"(\d+)([smhd]?)", text)
    if found is None:
        raise NotPossible(f"{text!r} is no time: give seconds, or 90s, 10m, 2h, 1d", 2)
    # Nobody means more digits than these: they are not even read.
    time_ms = int(found[1]) * UNITS[found[2]] if len(found[1]) < 20 else LONGEST_MS + 1
    if time_ms > LONGEST_MS:
        raise NotPossible(f"{text[:20]} is too long a time: 10 years (3650d) at most", 2)
    return time_ms
