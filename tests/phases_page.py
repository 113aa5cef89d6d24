"""The table of phases in docs/protocol.md is printed from `protocol/model/phases` (`--write`).

What else that page says of phases, its diagrams and the tables that explain them, is read and compared.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.model.phases import PHASES, Phase

PAGE = Path(__file__).parents[1] / "docs" / "protocol.md"
BEGIN, END = "<!-- phases: printed by `make fix` -->", "<!-- end of phases -->"
COLUMNS = ("phase", "asked of holders", "of replacements", "answers that count", "is over when", "then")
HEAD = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"
# Ways that lead out of a phase before it is over.
FAULT = {(JobPhase.RUNNING, JobPhase.AGREEING)}
MOVE = {(JobPhase.RUNNING, JobPhase.QUIESCING), (JobPhase.QUIESCING, JobPhase.RELEASING)}
MOVE |= {(JobPhase.HALTING, JobPhase.PARKING)}
NAMES = re.compile(r"\b(" + "|".join(phase.name for phase in JobPhase) + r")\b")


def names(kinds: tuple[type, ...]) -> str:
    return ", ".join(f"`{kind.__name__}`" for kind in kinds) or "-"


def row(phase: JobPhase, what: Phase) -> str:
    then = f"`{what.then}`" if what.then is not None else "-"
    cells = (f"`{phase}`", names(what.holders), names(what.replacements), names(what.answers), what.when or "-", then)
    return f"| {' | '.join(cells)} |"


def table() -> str:
    return "\n".join((HEAD, *(row(phase, what) for phase, what in PHASES.items())))


def made(page: str) -> str:
    """The page with the table as it has to be."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def ways(page: str) -> Iterator[tuple[JobPhase, JobPhase]]:
    """From which phase to which the diagrams of the page lead, from left to right."""
    for line in page.splitlines():
        found = [JobPhase[name] for name in NAMES.findall(line)]
        if "►" in line and len(found) > 2:
            yield from pairwise(found)


def explained(page: str) -> Iterator[tuple[JobPhase, set[str], set[str]]]:
    """The rows of the tables that explain: the phase, and the orders named for each of the two."""
    known = {kind.__name__ for what in PHASES.values() for kind in (*what.holders, *what.replacements)}
    for line in made(page).replace(table(), "").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 4 and cells[0].strip("`") in set(JobPhase):
            holders, others = (set(re.findall(r"`(\w+)", cell)) & known for cell in cells[1:3])
            yield JobPhase(cells[0].strip("`")), holders, others


def main() -> int:
    """Returns the exit code."""
    page = PAGE.read_text()
    if "--write" in sys.argv[1:]:
        PAGE.write_text(made(page))
        return 0
    if made(page) != page:
        print("docs/protocol.md: the table of phases is not as the code says: run `make fix`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
