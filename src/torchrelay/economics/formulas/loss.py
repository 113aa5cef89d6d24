"""Loss: what one failure takes from a job, and what share of its time is left over (ETTR), with and without migration.

Two forms. *Linear*: failures times the loss of each, as everybody publishes it; right while the product is small, and
more than the whole beyond that. *Renewal*: exact for failures that come at random (exponential gaps), at any rate.
"""

from __future__ import annotations

import math

from msgspec import Struct

from torchrelay.economics.formulas.rates import (
    Counting,
    Unreasonable,
    check_above,
    check_at_least,
    check_share,
    expected_failures,
)

SMALL = 0.1  # up to this lost share the linear form is within half a point of the renewal form


class Recovery(Struct, frozen=True, kw_only=True):
    """How a job gets over a failure. Hours. `coverage`: the share of failures that take no work, only `downtime_h`.

    The others go back to the last checkpoint: replace the node, restore the state, start up, do again what was lost.
    `retry_share`: the share of bring-ups that fail in their turn and are begun anew, each at the price of a whole one.
    """

    interval_h: float  # from checkpoint to checkpoint
    replacement_h: float = 0.0
    restore_h: float = 0.0
    startup_h: float = 0.0
    coverage: float = 0.0
    downtime_h: float = 0.0
    save_h: float = 0.0  # for how long a save blocks training
    retry_share: float = 0.0
    step_overhead: float = 0.0  # by which share steps take longer, with whatever brings the coverage

    def __post_init__(self) -> None:
        check_above("interval_h", self.interval_h, 0)
        for name in ("replacement_h", "restore_h", "startup_h", "downtime_h", "save_h"):
            check_at_least(name, getattr(self, name), 0)
        check_share("coverage", self.coverage)
        check_share("retry_share", self.retry_share)
        if self.retry_share == 1:
            raise Unreasonable("retry_share", "retry_share is 1: no bring-up would ever hold")
        check_at_least("step_overhead", self.step_overhead, 0)

    @property
    def bring_up_h(self) -> float:
        """b = (R + S + B) / (1 - q): with the attempts that it takes on average until one holds (geometric)."""
        return (self.replacement_h + self.restore_h + self.startup_h) / (1 - self.retry_share)


def restart_loss_h(recovery: Recovery) -> float:
    """Lost by a failure that goes back to a checkpoint: `I/2 + R + S + B` (half an interval on average)."""
    return recovery.interval_h / 2 + recovery.bring_up_h


def loss_h(recovery: Recovery) -> float:
    """Lost by a failure on average, covered or not: `c*d + (1 - c)*L`."""
    covered = recovery.coverage
    return covered * recovery.downtime_h + (1 - covered) * restart_loss_h(recovery)


def outage_h(recovery: Recovery) -> float:
    """For how long a job stands still after a failure, on average; work that is done again is not part of it."""
    return recovery.coverage * recovery.downtime_h + (1 - recovery.coverage) * recovery.bring_up_h


def reduction(before: Recovery, after: Recovery) -> float:
    """By which share `after` loses less per failure: `1 - Lm/L`. Negative if it loses more."""
    lost = loss_h(before)
    return 0.0 if lost == 0 else 1 - loss_h(after) / lost


def linear_loss(recovery: Recovery, mttf_h: float, counting: Counting = Counting.WALL) -> float:
    """The lost share of the time: `F*L/H`, and what saves and slower steps take; above 1 where the form does not hold.

    Raises `Unreasonable`.
    """
    each = expected_failures(1.0, mttf_h, counting, outage_h(recovery))
    return each * loss_h(recovery) + 1 - undisturbed(recovery)


def undisturbed(recovery: Recovery) -> float:
    """The useful share if nothing ever fails: saves and slower steps only."""
    if math.isinf(recovery.interval_h):
        return 1 / (1 + recovery.step_overhead)
    saving = recovery.save_h / (recovery.interval_h + recovery.save_h)
    return (1 - saving) / (1 + recovery.step_overhead)


def is_linear(lost_share: float) -> bool:
    """Whether the linear form may be used for this share."""
    return lost_share <= SMALL


def renewal_ettr(recovery: Recovery, mttf_h: float, counting: Counting = Counting.RUNNING) -> float:
    """The useful share of the time (ETTR), exact for exponential failures: 0 to 1.

    An interval I of work with its save s is done when it has run I + s without an uncovered failure, which come every
    u = M/(1-c); so it runs for `u * (exp((I+s)/u) - 1)`, and is set back `exp((I+s)/u) - 1` times (Daly 2006). Each of
    these takes the bring-up b, each covered failure the downtime d. If failures come in wall time they strike a
    recovery, too: see `repeated_h` and `pause_h`. Raises `Unreasonable`.
    """
    check_above("mttf_h", mttf_h, 0)
    work, segment, covered = recovery.interval_h, recovery.interval_h + recovery.save_h, recovery.coverage
    useful = undisturbed(recovery)
    if math.isinf(mttf_h):
        return useful
    bring_up, downtime, holds = recovery.bring_up_h, recovery.downtime_h, 1.0
    if counting is Counting.WALL:
        # Attempts begin anew one by one, so it is each that is repeated, and not the mean of all.
        attempts = 1 / (1 - recovery.retry_share)
        bring_up = attempts * repeated_h(bring_up / attempts, mttf_h)
        downtime, holds = pause_h(downtime, mttf_h, covered)
    # wall for an hour of running, covered failures only
    stretched = 1 + (covered * downtime / mttf_h if covered else 0.0)
    if covered == 1:
        return useful / stretched
    between = mttf_h / (1 - covered * holds)  # a covered one whose pause does not hold goes back, too
    setbacks = grown(segment / between)
    if math.isinf(setbacks) or math.isinf(bring_up):
        return 0.0  # no interval is ever done
    wall = between * setbacks * stretched + setbacks * bring_up
    return work / wall / (1 + recovery.step_overhead)


def repeated_h(span_h: float, mttf_h: float) -> float:
    """How long something takes that must go through without a failure, and begins anew at each."""
    return mttf_h * grown(span_h / mttf_h)


def pause_h(span_h: float, mttf_h: float, covered: float) -> tuple[float, float]:
    """How long a pause takes that failures strike, and the share of pauses that hold.

    A covered failure begins it anew; one that is not covered ends it, as then all go back to the checkpoint.
    """
    held = math.exp(-span_h / mttf_h)
    over = 1 - covered + covered * held  # by an end or by a fallback
    if over == 0:  # nothing goes so long without a failure
        return math.inf, 0.0
    return -mttf_h * math.expm1(-span_h / mttf_h) / over, held / over


def grown(exponent: float) -> float:
    """`exp(x) - 1`; infinite instead of an overflow."""
    return math.inf if exponent > 700 else math.expm1(exponent)


def pause_share(pause_h: float, mttf_h: float) -> float:
    """Lost share where each failure costs a pause and nothing is done again: `d / (M + d)`. Raises `Unreasonable`."""
    check_at_least("pause_h", pause_h, 0)
    check_above("mttf_h", mttf_h, 0)
    return pause_h / (mttf_h + pause_h)


def job_mfu(step_mfu: float, ettr: float) -> float:
    """Of the job: the step's MFU times ETTR. Raises `Unreasonable`."""
    check_share("step_mfu", step_mfu)
    check_share("ettr", ettr)
    return step_mfu * ettr


def coverage_needed(allowed_h: float, downtime_h: float, restart_loss_h: float) -> float:
    """The coverage at which a failure loses no more than is allowed, on average: `(L - a) / (L - d)`, within 0 to 1.

    Raises `Unreasonable` if migration itself takes longer than is allowed, as no coverage is enough then.
    """
    if downtime_h > allowed_h:
        raise Unreasonable(
            "downtime_h", f"downtime_h is {downtime_h:g}: more than the {allowed_h:g} h that are allowed"
        )
    if restart_loss_h <= allowed_h:
        return 0.0
    return (restart_loss_h - allowed_h) / (restart_loss_h - downtime_h)
