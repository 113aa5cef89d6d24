"""Published claims in hours, minutes and shares, each worked through, with what becomes of it otherwise."""

from __future__ import annotations

from msgspec.structs import replace

from torchrelay.economics.formulas.bill import Cluster, Form, bill
from torchrelay.economics.formulas.intervals import young_h
from torchrelay.economics.formulas.loss import (
    Recovery,
    coverage_needed,
    job_mfu,
    linear_loss,
    loss_h,
    pause_share,
    reduction,
    restart_loss_h,
)
from torchrelay.economics.formulas.rates import first_of, mttf_h, rate_per_1000_node_days
from torchrelay.economics.published.claims import Claim, Figure, Known, Otherwise, Unit, Verdict, figure
from torchrelay.economics.published.field import (
    LLAMA,
    LLAMA_DAYS,
    LLAMA_GPUS,
    LLAMA_STOPS,
    META,
    META_GPUS,
    META_MTTF_H,
    META_RATE,
    VENDOR,
    VENDOR_GPUS,
    VENDOR_MTTF_H,
)
from torchrelay.economics.published.vendor_case import (
    DAY,
    INPUTS,
    MINUTE_H,
    RESTART,
    SAVE_H,
    SHORT_RESTART,
    at_rate,
    day_lost,
    day_lost_minutes,
    migrating,
    month_cost,
)
from torchrelay.goodput.ledger import wilson

YEAR_MIN = 365 * 24 * 60
TEN_MIN_H = 10 * MINUTE_H
INPUTS_15 = {**INPUTS, "replacement, restore, start-up R/S/B": "15 min in all"}


def less_per_failure(minutes: float, coverage: float = 1.0, restart: Recovery = SHORT_RESTART) -> Figure:
    """By how much less a failure loses."""
    after, before = migrating(minutes, coverage, restart), restart
    text = f"1 - {60 * loss_h(after):.3g} min / {60 * loss_h(before):.3g} min"
    return figure(reduction(before, after), Unit.SHARE, "1 - (c*d + (1-c)*L) / L", text)


def coverage_for(minutes: float) -> Figure:
    """How many failures must be covered for less than ten minutes a day."""
    allowed_h = TEN_MIN_H / (24 / VENDOR_MTTF_H)
    text = f"(60 - {60 * allowed_h:.3f}) / (60 - {minutes:g})"
    value = coverage_needed(allowed_h, minutes * MINUTE_H, restart_loss_h(SHORT_RESTART))
    return figure(value, Unit.SHARE, "(L - 10 min * M/24) / (L - d)", text)


def hours_a_day_claim() -> Claim:
    return Claim(
        name="hours-a-day",
        known=Known.PUBLISHED,
        verdict=Verdict.YES,
        source=VENDOR,
        inputs=INPUTS_15,
        says="A job on 1,024 GPUs loses about 3 h a day to failures.",
        needs="15 min of bring-up; the headline in dollars takes 20",
        figures=(day_lost(SHORT_RESTART),),
        fails=(
            Otherwise(without="20 min of bring-up, as in the $307,000", figure=day_lost(RESTART)),
            Otherwise(
                without="6.5 failures per 1,000 node-days (Meta)", figure=day_lost(SHORT_RESTART, at_rate(META_RATE))
            ),
            Otherwise(
                without="an interval by Young (30 s a save)",
                figure=day_lost(replace(SHORT_RESTART, interval_h=young_h(SAVE_H, VENDOR_MTTF_H))),
            ),
        ),
    )


def minutes_a_day_claim() -> Claim:
    allowed = TEN_MIN_H / (24 / VENDOR_MTTF_H) * 60
    return Claim(
        name="minutes-a-day",
        known=Known.PUBLISHED,
        verdict=Verdict.ONLY_IF,
        source=VENDOR,
        says="With migration less than 10 min a day are lost.",
        needs="nearly every failure covered: 97.8 % of them at 2 min, 99.5 % at 3 min",
        inputs={**INPUTS_15, "coverage c": "1", "migration d": "3 min (2 min: the second figure)"},
        figures=(day_lost_minutes(migrating(3)), day_lost_minutes(migrating(2))),
        fails=(
            Otherwise(
                without="90 % covered, as is promised, 3 min; a restart loses 65 min",
                figure=day_lost_minutes(migrating(3, 0.9)),
            ),
            Otherwise(
                without="90 % covered, 2 min; a restart loses 65 min", figure=day_lost_minutes(migrating(2, 0.9))
            ),
            Otherwise(without="coverage needed at 2 min (a restart loses 60 min)", figure=coverage_for(2)),
            Otherwise(without="coverage needed at 3 min", figure=coverage_for(3)),
            Otherwise(
                without="the longest migration that stays below 10 min a day, all covered",
                figure=figure(allowed, Unit.MINUTES, "10 min * M / 24", "10 min x 7.9 h / 24 h"),
            ),
        ),
    )


def less_claim() -> Claim:
    return Claim(
        name="95-percent-less",
        known=Known.PUBLISHED,
        verdict=Verdict.ONLY_IF,
        source=VENDOR,
        says="Migration takes 95 % of the loss away.",
        needs="every failure covered; the same vendor promises 90 %",
        inputs={"lost by a restart L": "60 min", "coverage c": "1", "migration d": "3 min (2 min: the second figure)"},
        figures=(less_per_failure(3), less_per_failure(2)),
        fails=(
            Otherwise(without="90 % covered, 2 min; a restart loses 65 min", figure=less_per_failure(2, 0.9, RESTART)),
            Otherwise(without="90 % covered, 3 min; a restart loses 65 min", figure=less_per_failure(3, 0.9, RESTART)),
        ),
    )


def promise_claim() -> Claim:
    def low(clean: int, of: int) -> Figure:
        found = wilson(clean, of)
        assert found is not None
        return figure(found.low, Unit.BOUND, "lower bound of Wilson's 95 % interval", f"{clean} clean of {of}")

    return Claim(
        name="promise-90",
        known=Known.PUBLISHED,
        verdict=Verdict.ONLY_IF,
        source=f"{VENDOR} (else a credit of 25 %)",
        says="At least 90 % of the interruptions of supported workloads are resolved clean, over a contract year.",
        needs="enough interruptions to tell: 35 of 35 is the fewest that show it",
        inputs={"clean, of eligible": "35 of 35"},
        figures=(low(35, 35),),
        fails=(
            Otherwise(without="one fewer", figure=low(34, 34)),
            Otherwise(without="ten injected faults, all clean", figure=low(10, 10)),
            Otherwise(without="46 of 49, which is 93.9 %", figure=low(46, 49)),
            Otherwise(without="133 of 140, which is 95 %: still shows it", figure=low(133, 140)),
            Otherwise(without="128 of 135: does not", figure=low(128, 135)),
        ),
    )


def two_rates_claim() -> Claim:
    def rate(gpus: int, hours: float) -> Figure:
        text = f"24,000 / ({hours:.4g} h x {gpus:,} / 8)"
        value = rate_per_1000_node_days(gpus, hours)
        return figure(value, Unit.RATE, "24 * 1000 / (M * N/8)", text)

    def between(gpus: int, rate: float) -> Figure:
        text = f"24,000 / ({rate:.4g} x {gpus:,} / 8)"
        return figure(mttf_h(gpus, rate), Unit.HOURS, "24 * 1000 / (r * N/8)", text)

    stops_h = LLAMA_DAYS * 24 / LLAMA_STOPS
    dense = rate_per_1000_node_days(VENDOR_GPUS, VENDOR_MTTF_H)
    broken = Cluster(gpus=META_GPUS, mttf_h=mttf_h(META_GPUS, dense))
    linear, exact = linear_loss(RESTART, broken.mttf_h), bill(broken, RESTART, Form.RENEWAL).lost_share
    return Claim(
        name="two-rates",
        known=Known.UNVERIFIED,
        verdict=Verdict.NO,
        source=f"{META}; used by {VENDOR}",
        says="A job fails every 7.9 h on 1,024 GPUs, and every 1.8 h on 16,384.",
        needs="two rates: 16 times the GPUs should fail 16 times as often, here it is 4.4 times",
        inputs={"GPUs": "1,024 and 16,384", "time between failures M": "7.9 h and 1.8 h"},
        figures=(rate(VENDOR_GPUS, VENDOR_MTTF_H), rate(META_GPUS, META_MTTF_H)),
        fails=(
            Otherwise(without="the lower rate at 1,024 GPUs", figure=between(VENDOR_GPUS, META_RATE)),
            Otherwise(without="what the $307,524 are at that rate", figure=month_cost(at_rate(META_RATE))),
            Otherwise(without="the higher rate at 16,384 GPUs", figure=between(META_GPUS, dense)),
            Otherwise(
                without="lost share there by the linear formula: more than all, it does not hold",
                figure=figure(linear, Unit.SHARE, "(I/2 + b) / M", f"1.083 h / {broken.mttf_h:.4g} h"),
            ),
            Otherwise(
                without="lost share there by the renewal form",
                figure=figure(
                    exact,
                    Unit.SHARE,
                    "1 - I / ((M * e^(b/M)) * (e^(I/M) - 1))",
                    f"I = 1.5 h, b = 0.3333 h, M = {broken.mttf_h:.4g} h",
                ),
            ),
            Otherwise(
                without=f"419 unexpected stops in 54 days on the same 16,384 GPUs ({LLAMA})",
                figure=figure(stops_h, Unit.HOURS, "days * 24 / stops", "54 x 24 h / 419"),
            ),
            Otherwise(without="the rate of that", figure=rate(LLAMA_GPUS, stops_h)),
        ),
    )


def first_link_claim() -> Claim:
    def first(links: int, years: float) -> Figure:
        value = first_of(links, years * YEAR_MIN)
        return figure(value, Unit.MINUTES, "m / k", f"{years * YEAR_MIN:,.0f} min / {links:,} links")

    return Claim(
        name="first-link",
        known=Known.PUBLISHED,
        verdict=Verdict.YES,
        source=VENDOR,
        says="In a new cluster of 100,000 links the first of them fails after 26.28 min.",
        needs="100,000 links, which no single job uses; all fail independently, at a constant rate",
        inputs={"links k": "100,000", "each lasts m": "5 years"},
        figures=(first(100_000, 5),),
        fails=(
            Otherwise(without="the 1,024 links of a job on 1,024 GPUs", figure=first(1024, 5)),
            Otherwise(without="links that last a year", figure=first(100_000, 1)),
        ),
    )


def interval_claim() -> Claim:
    def half(hours: float, how: str) -> Figure:
        return figure(hours / 2, Unit.HOURS, "I / 2", f"{how} / 2")

    tuned = young_h(SAVE_H, VENDOR_MTTF_H)
    return Claim(
        name="interval-3h",
        known=Known.PUBLISHED,
        verdict=Verdict.YES,
        source=VENDOR,
        says="A checkpoint every 3 h means 1.5 h of work lost on average.",
        needs="an interval that nobody needs to choose at this rate",
        inputs={"checkpoint interval I": "3 h"},
        figures=(half(3, "3 h"),),
        fails=(
            Otherwise(without="an interval of 1.5 h, as in the $307,000", figure=half(1.5, "1.5 h")),
            Otherwise(without="Young's interval at 7.9 h, 30 s a save", figure=half(tuned, f"{tuned:.4g} h")),
        ),
    )


def restart_claim() -> Claim:
    after, before = replace(SHORT_RESTART, replacement_h=0, restore_h=0, startup_h=105 / 3600), SHORT_RESTART
    return Claim(
        name="restart-1m45",
        known=Known.SECOND_HAND,
        verdict=Verdict.ONLY_IF,
        source="AWS, told by others",
        says="A restart takes 1:45 in place of about 15 min.",
        needs="only the bring-up is counted, not the work that is done again",
        inputs={"bring-up b": "1:45 min, before: 15 min"},
        figures=(figure(1 - after.bring_up_h / before.bring_up_h, Unit.SHARE, "1 - b'/b", "1 - 1.75 min / 15 min"),),
        fails=(
            Otherwise(
                without="with the half of an interval of 1.5 h that is done again",
                figure=figure(
                    reduction(before, after),
                    Unit.SHARE,
                    "1 - (I/2 + b') / (I/2 + b)",
                    "1 - (45 + 1.75) min / (45 + 15) min",
                ),
            ),
        ),
    )


def mfu_claim() -> Claim:
    ettr = 1 - linear_loss(SHORT_RESTART, DAY.mttf_h)
    return Claim(
        name="mfu-30-50",
        known=Known.PUBLISHED,
        verdict=Verdict.ONLY_IF,
        source=VENDOR,
        says="GPUs often run at 30 to 50 % of their theoretical performance.",
        needs="nearly all of the rest is in the steps themselves, not in failures",
        inputs={"step MFU": "40 % (taken from the middle)", "lost to failures": "3.04 h a day"},
        figures=(figure(job_mfu(0.4, ettr), Unit.SHARE, "step MFU * ETTR", f"40 % x {ettr:.4f}"),),
        fails=(
            Otherwise(
                without="no failure at all", figure=figure(job_mfu(0.4, 1), Unit.SHARE, "step MFU * ETTR", "40 % x 1")
            ),
        ),
    )


def pause_claim() -> Claim:
    def lost(seconds: float, hours: float) -> Figure:
        text = f"{seconds:g} s / ({hours:g} h + {seconds:g} s)"
        return figure(pause_share(seconds / 3600, hours), Unit.SHARE, "d / (M + d)", text)

    return Claim(
        name="pause-20s",
        known=Known.PUBLISHED,
        verdict=Verdict.ONLY_IF,
        source="TrainMover",
        says="A failure costs a pause of about 20 s, with nothing done again.",
        needs="every failure covered; at 7.9 h between failures a longer pause would do as well",
        inputs={"pause d": "20 s", "time between failures M": "7.9 h"},
        figures=(lost(20, 7.9),),
        fails=(
            Otherwise(without="47 s (AWS) in place of 20", figure=lost(47, 7.9)),
            Otherwise(without="5 s in place of 20", figure=lost(5, 7.9)),
            Otherwise(without="M = 1.8 h (16,384 GPUs)", figure=lost(20, 1.8)),
            Otherwise(without="M = 0.23 h (131,072 GPUs): here seconds begin to matter", figure=lost(20, 0.23)),
            Otherwise(without="the same with 47 s", figure=lost(47, 0.23)),
        ),
    )


TIMES = (
    hours_a_day_claim, minutes_a_day_claim, less_claim, promise_claim, two_rates_claim, first_link_claim,
    interval_claim, restart_claim, mfu_claim, pause_claim,
)  # fmt: skip
