"""`torchrelay explain`: one incident in full; or why a move, a rank, a place or a spare is as it is, or is not."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

from torchrelay.api.shown import IncidentView, WhyView, size_text
from torchrelay.client.runs import NotPossible, Source, find_incident, find_source
from torchrelay.goodput.ledger import line_of
from torchrelay.terminal.show import Output, milliseconds, remark, show_json

INCIDENT = re.compile(r"(I-)?\d+", re.IGNORECASE)


def show_explanation(given: argparse.Namespace) -> None:
    """Print one incident, or why something is as it is. Raises `NotPossible`, `Denied`."""
    about = " ".join(given.about)
    source, note = find_source(given.run_dir)
    remark(note)
    if INCIDENT.fullmatch(about):
        found = known_incident(source, about, given.job)
        print(show_json(found) if given.output is Output.JSON else "\n".join(explain(found)))
        return
    why = source.view_why(about, given.job)
    print(show_json(why) if given.output is Output.JSON else "\n".join(tell_why(why)))


def known_incident(source: Source, name: str, job: str | None) -> IncidentView:
    try:
        return find_incident(source, name.upper(), job)
    except NotPossible as error:
        if name.isdecimal():
            raise NotPossible(f"{error} (of a rank: `torchrelay explain rank {name}`)", error.code) from error
        raise


def tell_why(why: WhyView) -> Iterator[str]:
    """What speaks for and against it, and what was decided."""
    yield why.about
    yield from (f"  {line}" for line in why.lines)
    if why.story:
        yield ""
        yield "what was decided, and why"
        yield from (f"  {'+' + milliseconds(told.after_ms):>12}  {told.text}" for told in why.story)


def explain(incident: IncidentView) -> Iterator[str]:
    """The whole story of an incident."""
    line = line_of(incident)
    counted = "" if line.eligible else f" (not counted: {line.excluded})"
    yield f"{incident.name} of {incident.job}, generation {incident.generation}: {incident.resolution}{counted}"
    yield f"{incident.kind}{': ' if incident.move else ''}{incident.move}"
    if line.evidence:
        yield f"not counted in the clean ratio, since: {line.evidence}"
    yield ""
    yield "what went wrong" if incident.kind == "unplanned" else "why it was moved"
    for fault in incident.faults:
        who = f"rank {fault.rank}" if fault.rank is not None else "no rank"
        where = f", worker {fault.worker}" if fault.worker else ""
        where += f" on {fault.node}" if fault.node else ""
        yield f"  {fault.at[11:23]}  {who}{where}: {fault.cause}"
        yield f"  {'':12}  told by: {fault.detector}"
    yield ""
    yield "what was decided, and why"
    for told in incident.story:
        yield f"  {'+' + milliseconds(told.after_ms):>12}  {told.text}"
    yield ""
    yield "what it came to"
    yield f"  verdict      {line.verdict or 'none'}"
    yield f"  goes on from {line.resume_point or '-'}"
    moved = f", {size_text(line.bytes)}, digest {line.digest} equal" if line.digest else ""
    yield f"  state from   {line.source or '-'}{moved}"
    lost = "only the script's checkpoint can tell" if line.steps_lost is None else str(line.steps_lost)
    yield f"  steps lost   {lost}"
    for failed in line.tried:
        yield f"  on the way   {failed}"
    yield f"  pause        {milliseconds(line.pause_ms)}"
    for phase, span in line.phases.items():
        yield f"    {phase:<10} {milliseconds(span):>10}"
