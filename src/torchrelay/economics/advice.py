"""Advice: how far checkpoints can be thinned, given how many failures were resolved clean; and what that risks.

Only a failure that is not resolved clean goes back to a checkpoint. If a share c is, these come every M/(1-c), and the
best interval grows by 1/sqrt(1-c). The measured share is uncertain, so what is advised is the interval for the lower
end of its confidence interval: it cannot be too long if the truth lies within.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from torchrelay.economics.assumptions import Inputs
from torchrelay.economics.calculator import by_migration, cluster_of, pause_of_s
from torchrelay.economics.formulas.bill import Cluster
from torchrelay.economics.formulas.intervals import daly_h, young_h
from torchrelay.economics.formulas.loss import renewal_ettr
from torchrelay.economics.formulas.rates import HOURS_PER_DAY, Unreasonable
from torchrelay.economics.measured import Measured
from torchrelay.economics.published.claims import dollars, proven_share
from torchrelay.goodput.ledger import wilson

FAR_APART = 0.05  # Young's interval and Daly's: from here on saves are long beside the time between failures


class Option(Struct, frozen=True, kw_only=True):
    """One interval, and the useful share of the time if the coverage is the measured one, its lower bound, or none."""

    name: str
    interval_h: float
    thinner: float  # than Young's interval without coverage
    saves_a_day: float
    ettr_measured: float
    ettr_low: float
    ettr_none: float
    rollback_mean_h: float  # lost by a failure that goes back to it: half an interval and the bring-up
    rollback_worst_h: float  # a whole interval and the bring-up
    advised: bool = False


class Advice(Struct, frozen=True, kw_only=True):
    """What is advised, the other choices beside it, and the numbers behind it."""

    measured: Measured
    mttf_h: float
    save_s: float
    recovery_s: float
    coverage: float  # what goes into the formulas: see `covered`
    coverage_low: float
    rollbacks: float  # over the horizon, at the measured share
    rollbacks_low: float  # at the lower bound
    options: tuple[Option, ...]
    saved_dollars: float  # by the advised interval against Young's without coverage, at the measured share
    saved_low_dollars: float  # the same at the lower bound
    reasons: tuple[str, ...]
    risks: tuple[str, ...]

    @property
    def advised(self) -> Option:
        return next(option for option in self.options if option.advised)


def advise(inputs: Inputs, measured: Measured) -> Advice:
    """Work the advice out. Raises `Unreasonable`."""
    cluster = cluster_of(inputs)
    share, low = covered(measured)
    pause_s = pause_of_s(inputs, measured)
    options = options_of(inputs, cluster, share, low, pause_s / 3600)
    failures = cluster.horizon_h / cluster.mttf_h
    plain, chosen = options[1], next(option for option in options if option.advised)
    whole = cluster.horizon_h * cluster.gpus * cluster.price_per_gpu_hour
    return Advice(
        measured=measured,
        mttf_h=cluster.mttf_h,
        save_s=inputs.save_s,
        recovery_s=pause_s,
        coverage=share,
        coverage_low=low,
        rollbacks=failures * (1 - share),
        rollbacks_low=failures * (1 - low),
        options=options,
        saved_dollars=whole * (chosen.ettr_measured - plain.ettr_measured),
        saved_low_dollars=whole * (chosen.ettr_low - plain.ettr_low),
        reasons=reasons(inputs, cluster, measured, low, chosen),
        risks=risks(measured, share, low, plain, chosen),
    )


def covered(measured: Measured) -> tuple[float, float]:
    """The share of failures that need no checkpoint, and its lower bound.

    What the clean ratio leaves out (a user's error, a stop) may need a checkpoint all the same, so here it counts.
    """
    of_all = wilson(measured.clean, measured.eligible + measured.not_counted_to_checkpoint)
    if of_all is None:
        raise Unreasonable("ledger", f"{measured.source}: nothing was measured")
    return of_all.share, of_all.low


def options_of(inputs: Inputs, cluster: Cluster, share: float, low: float, pause_h: float) -> tuple[Option, ...]:
    """The interval of now, and the best ones for no coverage, for the lower bound (advised), for the measured share."""
    save_h, between = inputs.save_s / 3600, cluster.mttf_h
    plain = young_h(save_h, between)

    def option(name: str, interval_h: float | None, coverage: float, *, advised: bool = False) -> Option:
        chosen = by_migration(inputs, between, coverage, pause_h, interval_h)
        truths = [renewal_ettr(replace(chosen, coverage=truth), between, cluster.counting) for truth in (share, low, 0)]
        return Option(
            name=name,
            interval_h=chosen.interval_h,
            thinner=chosen.interval_h / plain,
            saves_a_day=HOURS_PER_DAY / (chosen.interval_h + save_h),
            ettr_measured=truths[0],
            ettr_low=truths[1],
            ettr_none=truths[2],
            rollback_mean_h=chosen.interval_h / 2 + chosen.bring_up_h,
            rollback_worst_h=chosen.interval_h + chosen.bring_up_h,
            advised=advised,
        )

    return (
        option("now (--interval-h)", inputs.interval_h, 0),
        option("best without coverage", None, 0),
        option("best at the lower bound", None, low, advised=True),
        option("best at the measured ratio", None, share),
    )


def reasons(inputs: Inputs, cluster: Cluster, measured: Measured, low: float, chosen: Option) -> tuple[str, ...]:
    """The numbers behind it."""
    ratio = measured.ratio
    save_h = inputs.save_s / 3600
    young, daly = young_h(save_h, cluster.mttf_h, low), daly_h(save_h, cluster.mttf_h, low)
    found = [
        f"{measured.clean} of {measured.eligible} failures were resolved clean ({measured.source}): "
        f"{proven_share(ratio.share)}, with 95 % confidence {proven_share(ratio.low)} to "
        f"{proven_share(ratio.high, up=True)}",
        f"I = sqrt(2 * s * M / (1 - c)) = sqrt(2 x {inputs.save_s:g} s x {cluster.mttf_h:.4g} h / {1 - low:.4g}) "
        f"= {young:.3g} h",
    ]
    if measured.not_counted_to_checkpoint:
        found.append(
            f"{measured.not_counted_to_checkpoint} interruptions that the ratio leaves out needed a checkpoint, too: "
            f"with them it is {proven_share(covered(measured)[0])}, at least {proven_share(low)}"
        )
    if chosen.interval_h < young:
        found.append(f"cut to {chosen.interval_h:g} h (--longest-interval-h): a checkpoint is insurance, too")
    if abs(daly / young - 1) > FAR_APART:
        found.append(f"saves are long beside the time between failures: Daly's interval is {daly:.3g} h")
    return tuple(found)


def risks(measured: Measured, share: float, low: float, plain: Option, chosen: Option) -> tuple[str, ...]:
    """What is lost if it goes wrong."""
    found = [
        f"a failure that does go back loses {chosen.rollback_mean_h:.3g} h on average and "
        f"{chosen.rollback_worst_h:.3g} h at worst, in place of {plain.rollback_mean_h:.3g} and "
        f"{plain.rollback_worst_h:.3g} h",
        f"if only {proven_share(low)} are covered, ETTR is {chosen.ettr_low:.4f} (with checkpoints as dense as without "
        f"coverage: {plain.ettr_low:.4f})",
        f"if nothing is covered any more, ETTR falls to {chosen.ettr_none:.4f} (dense: {plain.ettr_none:.4f}): watch "
        "the clean ratio, and make checkpoints dense again when it falls",
    ]
    if low < 0.5:
        found.append(
            f"{measured.eligible} failures say little: the lower bound is {proven_share(low)}; break the job on "
            "purpose (torchrelay chaos any --repeat 35) to know more"
        )
    elif share == 1:
        found.append("no failure went back so far, so the measured ratio alone would advise no checkpoints at all")
    return tuple(found)


def advice_line(advice: Advice) -> str:
    """The advice in a sentence."""
    chosen = advice.advised
    return (
        f"save every {chosen.interval_h:.3g} h: {chosen.thinner:.2g} times as far apart as without coverage, "
        f"{chosen.saves_a_day:.1f} saves a day; worth "
        f"{dollars(advice.saved_dollars)} over the horizon, {dollars(advice.saved_low_dollars)} at the lower bound"
    )
