"""`torchrelay status`: how a job is doing."""

from __future__ import annotations

import argparse

from torchrelay.api.shown import JobStatus
from torchrelay.client.runs import find_source
from torchrelay.terminal.show import Output, milliseconds, remark, show, show_json


def show_status(given: argparse.Namespace) -> None:
    """Print a job's status."""

    def page() -> str:
        source, note = find_source(given.run_dir)
        remark(note)
        found = source.job(given.job)
        return show_json(found) if given.output is Output.JSON else status_page(found)

    show(page, watch=given.watch)


def status_page(job: JobStatus) -> str:
    """A few lines: the name of each fact, and the fact."""
    step = "not started" if job.step is None else str(job.step)
    pace = f", {milliseconds(job.step_ms)} a step" if job.step_ms is not None else ""
    spares, incidents = job.spares, job.incidents
    tally = f"{incidents.clean} of {incidents.eligible} clean"
    if incidents.open:
        tally += f", {incidents.open} open"
    if incidents.total > incidents.eligible:
        tally += f", {incidents.total - incidents.eligible} not counted"
    facts = {
        "job": f"{job.job} ({job.world_size} ranks)",
        "phase": f"{job.phase}: {job.why}" if job.why else job.phase,
        "step": f"{step}{pace}",
        "generation": str(job.generation),
        "spares": f"{spares.warm} warm, {spares.starting} starting, {spares.wanted} wanted",
        "incidents": f"{incidents.total} ({tally})" if incidents.total else "none",
    }
    if job.sharing:
        ranks = f"rank{'s' * (len(job.sharing) > 1)} {', '.join(map(str, job.sharing))}"
        facts["sharing"] = f"{ranks} in the slots of others, until there is room"
    if job.move is not None:
        facts["move"] = f"{job.move.name} ({job.move.kind}) {job.move.state}: {job.move.why}"
    if job.parking:
        facts["parking"] = job.parking
    if job.freezes:
        facts["frozen"] = "; ".join(f"by {one.source}{': ' if one.reason else ''}{one.reason}" for one in job.freezes)
    if job.taints:
        facts["taints"] = "; ".join(taint.text for taint in job.taints)
    if job.lease:
        facts["lease"] = str(job.lease) + (f": the orchestrator was started {job.lease} times" if job.lease > 1 else "")
    if job.restarts:
        facts["restarts"] = f"{job.restarts} from the script's own checkpoint"
    if job.waiting_s is not None:
        facts["waiting"] = f"{job.waiting_s:.0f} s for a spare"
    if job.outcome is not None:
        facts["outcome"] = f"exit code {job.outcome.code}: {job.outcome.reason}"
    width = max(map(len, facts))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in facts.items())
