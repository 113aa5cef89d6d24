"""`torchrelay explain`: one incident in full."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torchrelay.cli.runs import find_incident, look
from torchrelay.cli.show import Output, milliseconds, remark, show_json
from torchrelay.goodput.ledger import line_of
from torchrelay.orchestrator.views import IncidentView, size_text


def show_incident(name: str, run_dir: Path | None, job: str | None, output: Output) -> None:
    """Print one incident."""
    source, note = look(run_dir)
    remark(note)
    found = find_incident(source, name, job)
    print(show_json(found) if output is Output.JSON else "\n".join(explain(found)))


def explain(incident: IncidentView) -> Iterator[str]:
    """The whole story of an incident."""
    line = line_of(incident)
    counted = "" if incident.eligible else " (a user's error or an operator's stop: not counted)"
    yield f"{incident.name} of {incident.job}, generation {incident.generation}: {incident.resolution}{counted}"
    yield ""
    yield "what went wrong"
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
    yield f"  goes on from {line.target or '-'}"
    moved = f", {size_text(line.bytes)}, digest {line.digest} equal" if line.digest else ""
    yield f"  state from   {line.source or '-'}{moved}"
    lost = "only the script's checkpoint can tell" if line.steps_lost is None else str(line.steps_lost)
    yield f"  steps lost   {lost}"
    for failed in line.tried:
        yield f"  on the way   {failed}"
    yield f"  pause        {milliseconds(line.pause_ms)}"
    for phase, span in line.phases.items():
        yield f"    {phase:<10} {milliseconds(span):>10}"
