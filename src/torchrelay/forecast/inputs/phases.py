"""Phases: how long each part of a recovery takes; drawn anew for each generation of a recovery.

From a run's `ledger.jsonl` whole incidents are drawn, with replacement, so that phases that are long together stay so.
What is given instead is log-normal. Names are those of the ledger (`orchestrator.views.views.ALL_PHASES`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from torchrelay.economics.formulas.rates import Unreasonable, check_at_least
from torchrelay.goodput.ledger import Line
from torchrelay.orchestrator.views.views import ALL_PHASES
from torchrelay.protocol.model.incident import Resolution

HOUR_S = 3600.0
# Together 120 s, as the reference product says of its planned moves; how they are split is assumed.
ASSUMED_S = {"detect": 15.0, "interrupt": 1.0, "agree": 1.0, "acquire": 33.0, "reconfigure": 20.0, "restore": 40.0,
             "resume": 10.0, "stand": 5.0, "cutover": 5.0}  # fmt: skip
ASSUMED_CV = 0.3
OF_MOVES = ("stand", "cutover")  # no failure has these, so a ledger of failures says nothing of them


@dataclass(frozen=True)
class Span:
    """A time in seconds: its mean, and its standard deviation as a share of that."""

    mean_s: float
    cv: float = ASSUMED_CV

    def __post_init__(self) -> None:
        check_at_least("mean_s", self.mean_s, 0)
        check_at_least("cv", self.cv, 0)

    def draw(self, chance: np.random.Generator) -> float:
        """Log-normal, in seconds."""
        if self.mean_s == 0 or self.cv == 0:
            return self.mean_s
        sigma2 = math.log1p(self.cv**2)
        return float(self.mean_s * math.exp(math.sqrt(sigma2) * chance.standard_normal() - sigma2 / 2))


class Phases:
    """Where phases come from: incidents of a ledger, or given spans; a given one has precedence."""

    def __init__(
        self,
        given: Mapping[str, Span],
        measured: tuple[Mapping[str, int], ...] = (),
        source: str = "",
        moves: tuple[Mapping[str, int], ...] = (),
    ) -> None:
        unknown = sorted(set(given) - set(ALL_PHASES))
        if unknown:
            why = f"{unknown[0]!r} is not known; there are: {', '.join(ALL_PHASES)}"
            raise Unreasonable("phase", f"phase {why}", why)
        self.given = dict(given)
        self.measured = measured
        self.moves = moves  # as measured: of planned and pre-emptive ones
        self.source = source or "assumed: 120 s in all, as the reference product says of its planned moves"

    def draw(self, chance: np.random.Generator, *, move: bool = False) -> dict[str, float]:
        """Seconds of each phase: of a failure, or of a move. Phases of moves are assumed if no move was measured."""
        lines = self.moves if move and self.moves else self.measured
        line = lines[int(chance.integers(len(lines)))] if lines else None
        spans = {name: self.given.get(name, Span(mean)) for name, mean in ASSUMED_S.items()}
        found = {}
        for name, span in spans.items():
            known = name not in self.given and (lines is self.moves or name not in OF_MOVES)
            found[name] = line.get(name, 0) / 1000 if known and line is not None else span.draw(chance)
        return found

    def pause_s(self) -> float:
        """The mean of an unplanned pause, as drawn."""
        names = ("detect", "interrupt", "agree", "acquire", "reconfigure", "restore", "resume")
        if not self.measured:
            return sum(self.given.get(name, Span(ASSUMED_S[name])).mean_s for name in names)
        means = {name: sum(line.get(name, 0) for line in self.measured) / len(self.measured) / 1000 for name in names}
        return sum(self.given[name].mean_s if name in self.given else means[name] for name in names)


def phases_of_ledger(path: Path, given: Mapping[str, Span]) -> Phases:
    """The incidents of a ledger that were resolved clean, failures and moves apart.

    Raises `ValueError`, naming file and line.
    """
    measured: list[Mapping[str, int]] = []
    moves: list[Mapping[str, int]] = []
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    for number, row in enumerate(text.splitlines(), 1):
        if not row.strip():
            continue
        try:
            line = msgspec.json.decode(row, type=Line)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}, line {number}: no line of a ledger: {error}") from error
        if line.resolution == Resolution.CLEAN and line.phases:
            (measured if line.kind == "unplanned" else moves).append(line.phases)
    if not measured:
        raise ValueError(
            f"{path}: no unplanned incident that was resolved clean: there is nothing to draw from; "
            "give --phase instead, or `torchrelay report --write` in a run that has had faults"
        )
    of_moves = f"{len(moves)} moves" if moves else "no move, so those of moves are assumed"
    source = f"{path}: {len(measured)} incidents as they were measured, {of_moves}"
    return Phases(given, tuple(measured), source, tuple(moves))
