"""Results of `compare`: what came out of each system with each model; and the flat figures of the last line. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from msgspec import Struct

from compare_figures import Figures, Plain, Seen, mean_of, pause_s, usual_s
from compare_phases import longest, medians, phases
from compare_schedule import Fault, What

NEVER = "no rank did the last step"
SECOND_A_FAULT = 1.0  # what a fault may cost torchrelay, beside the undisturbed time
FLAT = ("jct_s", "jct_samples_s", "ettr", "lost_steps", "repeated_steps", "unplanned_pause_p50_s",
        "unplanned_pause_max_s", "planned_pause_p50_s", "hang_pause_s", "skipped_samples_share", "once_share",
        "step_time_ratio", "cpu_time_ratio", "bit_equal", "faults", "idle_faults")  # fmt: skip


class Outcome(Struct, frozen=True, kw_only=True):
    """One system. `reason`: why it did not run, or not come to the end; empty if it did. `before`: of its first try."""

    name: str
    title: str
    hang: str = ""
    note: str = ""
    reason: str = ""
    before: str = ""
    order: dict[str, Any] = {}
    packages: list[str] = []
    seen: Seen | None = None
    figures: Figures | None = None

    @property
    def ours(self) -> bool:
        return self.name.startswith("torchrelay")


class Run(Struct, frozen=True, kw_only=True):
    """All systems with one model. `every`: steps between checkpoints; `left_out`: whom nobody asked for.

    `again`: plain PyTorch once more, at the end; None if that did not come to its end.
    """

    model: str
    about: str
    steps: int
    ranks: int
    per_job: float
    schedule: list[Fault]
    plain: Plain
    again: Plain | None
    none: Seen
    every: dict[str, int]
    copy_s: float
    write_s: float
    outcomes: list[Outcome]
    left_out: list[str] = []
    between: Plain | None = None  # plain PyTorch right before torchrelay, if others ran before
    turns: dict[str, Any] = {}  # figures of torchrelay's and plain PyTorch's jobs in turns; empty: not measured

    @property
    def undisturbed_s(self) -> float:
        return self.measure.jct_s

    @property
    def measure(self) -> Plain:
        """What the others are measured by."""
        return self.plain if self.again is None else mean_of(self.plain, self.again)

    @property
    def beside_s(self) -> float:
        """What plain PyTorch took right before and after torchrelay: in an hour a machine becomes slower or faster."""
        if self.between is None or self.again is None:
            return self.undisturbed_s
        return mean_of(self.between, self.again).jct_s

    @property
    def drift(self) -> float | None:
        return None if self.again is None else self.again.jct_s / self.plain.jct_s - 1


def over_bound(run: Run, outcome: Outcome) -> float | None:
    """JCT over what the undisturbed job and a second for each fault would take."""
    found = outcome.figures
    if found is None or found.jct_s is None:
        return None
    return found.jct_s / (run.beside_s + SECOND_A_FAULT * found.faults)


def spent(run: Run, outcome: Outcome) -> dict[str, float] | None:
    """Where the seconds beyond the undisturbed time went; `rest` is what the other lines do not explain.

    A step that was refused is no step that was done: its time is in the pause, and counts there.
    """
    found, seen = outcome.figures, outcome.seen
    if found is None or seen is None or found.jct_s is None:
        return None
    step_s = usual_s(seen, run.measure.step_s)
    pauses = [pause_s(seen, at, step_s) or 0.0 for at in range(len(seen.struck))]
    parts = {
        "stood": sum(pauses),
        "steps done again": found.repeated_steps * step_s,
        "longer steps": (step_s - run.measure.step_s) * run.steps,
    }
    beyond = found.jct_s - run.undisturbed_s
    return {"beyond the undisturbed": beyond, **parts, "rest": beyond - sum(parts.values())}


def known(value: object) -> object:
    """None for what could not be computed: JSON has no other word for it."""
    return None if isinstance(value, float) and math.isnan(value) else value


def flat_of(run: Run) -> dict[str, object]:
    """The figures of one model, each by the names of model and system."""
    found: dict[str, object] = {
        f"{run.model}_none_jct_s": run.undisturbed_s,
        f"{run.model}_none_beside_s": run.beside_s,
        f"{run.model}_none_step_s": run.plain.step_s,
        f"{run.model}_drift": run.drift,
    }
    for one in run.outcomes:
        start = f"{run.model}_{one.name.replace('-', '_')}"
        if one.reason:
            found[f"{start}_reason"] = one.reason
        if one.before:
            found[f"{start}_reason_before"] = one.before
        if one.figures is not None:
            found |= {f"{start}_{name}": known(getattr(one.figures, name)) for name in FLAT}
        if one.ours:
            found[f"{start}_over_bound"] = over_bound(run, one)
            found[f"{start}_turns_over_bound"] = run.turns.get(f"{one.name.replace('-', '_')}_over_bound")
    return found


def flat(runs: Iterable[Run]) -> dict[str, object]:
    return {name: value for run in runs for name, value in flat_of(run).items()}


def record(run: Run) -> dict[str, Any]:
    """All of a model's part that is worth keeping, without each rank's every step."""
    kept = {name: getattr(run, name) for name in Run.__struct_fields__ if name not in ("none", "outcomes")}
    outcomes = []
    for one in run.outcomes:
        told = {name: getattr(one, name) for name in Outcome.__struct_fields__ if name != "seen"}
        if one.seen is not None:
            told |= {"struck": one.seen.struck, "missed": one.seen.missed, "ledger": one.seen.ledger}
            each = {what.value: phases(one.seen, what) for what in What}
            told |= {"phases": each, "phases_p50": {what: medians(some) for what, some in each.items()}}
            told |= {"phases_max": {what: longest(some) for what, some in each.items()}, "spent": spent(run, one)}
            step_s = usual_s(one.seen, run.measure.step_s)
            told |= {"digests": one.seen.digests}
            told |= {"pauses_s": [pause_s(one.seen, at, step_s) for at in range(len(one.seen.struck))]}
        outcomes.append(told)
    return {**kept, "outcomes": outcomes}
