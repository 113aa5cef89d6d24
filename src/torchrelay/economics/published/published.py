"""Published figures as presets: each is worked out anew from its inputs, never stored.

Those in dollars and GPU-hours are here, those in hours, minutes and shares in `published_times`.
"""

from __future__ import annotations

import difflib

from msgspec.structs import replace

from torchrelay.economics.formulas.bill import Cluster, spares_dollars
from torchrelay.economics.formulas.intervals import young_h
from torchrelay.economics.formulas.loss import Recovery
from torchrelay.economics.formulas.rates import Counting, Unreasonable, mttf_h
from torchrelay.economics.published.claims import Claim, Figure, Known, Otherwise, Unit, Verdict, figure
from torchrelay.economics.published.field import LLAMA, LLAMA_DAYS, LLAMA_GPUS, LLAMA_RATE, META_RATE, VENDOR
from torchrelay.economics.published.published_times import TIMES
from torchrelay.economics.published.vendor_case import (
    CLUSTER,
    HOT_SPARE_H,
    INPUTS,
    MINUTE_H,
    RESTART,
    SAVE_H,
    SHORT_RESTART,
    at_rate,
    migrating,
    month_cost,
    month_saved,
    month_saved_net,
    month_saved_tuned,
)

# ---------------------------------------------------------------- dollars and GPU-hours

# Each is worked through, with what becomes of it under other assumptions.

LARGE_GPUS = 2048
YEAR_DAYS = 365
# On a line in both logarithms between Meta's two points, 7.9 h at 1,024 GPUs and 1.8 h at 16,384.
BETWEEN_META_POINTS_H = 7.9 * (1.8 / 7.9) ** 0.25


def month_cost_claim() -> Claim:
    as_loss = replace(RESTART, interval_h=3.0)  # half of it is lost
    return Claim(
        name="month-cost",
        known=Known.PUBLISHED,
        verdict=Verdict.YES,
        source=VENDOR,
        inputs=INPUTS,
        says="Failures cost a job on 1,024 GPUs about $307,000 a month.",
        needs="23.7 failures per 1,000 node-days; a checkpoint every 1.5 h; linear formula; M counts wall time",
        figures=(month_cost(),),
        fails=(
            Otherwise(
                without="6.5 failures per 1,000 node-days (Meta, 1.8 h at 16,384 GPUs)",
                figure=month_cost(at_rate(META_RATE)),
            ),
            Otherwise(without="3.79 failures per 1,000 node-days (Llama 3)", figure=month_cost(at_rate(LLAMA_RATE))),
            Otherwise(without="a month of 30 days", figure=month_cost(replace(CLUSTER, horizon_h=720))),
            Otherwise(
                without="M counts the time that the job runs",
                figure=month_cost(replace(CLUSTER, counting=Counting.RUNNING)),
            ),
            Otherwise(without="1.5 h is what is lost, not the interval", figure=month_cost(CLUSTER, as_loss)),
            Otherwise(
                without="bring-up of 15 min, as in the vendor's own footnote", figure=month_cost(CLUSTER, SHORT_RESTART)
            ),
        ),
    )


def month_saved_claim() -> Claim:
    thin = young_h(SAVE_H, CLUSTER.mttf_h, coverage=0.9)
    saving = Recovery(interval_h=thin, save_h=SAVE_H, replacement_h=HOT_SPARE_H, coverage=0.9, downtime_h=2 * MINUTE_H)
    three = migrating(3)
    return Claim(
        name="month-saved",
        known=Known.PUBLISHED,
        verdict=Verdict.ONLY_IF,
        source=VENDOR,
        says="Migration saves about $300,000 a month on 1,024 GPUs.",
        needs="every failure covered; an untuned baseline; no spares on the bill",
        inputs={**INPUTS, "coverage c": "1", "migration d": "3 min (2 min: the second figure)"},
        figures=(month_saved(three), month_saved(migrating(2))),
        fails=(
            Otherwise(
                without="a tuned baseline (Young's interval, 30 s a save, 5-min hot spare); all covered, 3 min, "
                "no saves charged to migration",
                figure=month_saved_tuned(three),
            ),
            Otherwise(
                without="the same baseline; 90 % covered, 2 min, saves and hot spares on both sides",
                figure=month_saved_tuned(saving),
            ),
            Otherwise(without="spares charged: 2 % of the nodes", figure=month_saved_net(three, 0.02 * 128)),
            Otherwise(without="spares charged: 8 of 72, the ninth part", figure=month_saved_net(three, 128 / 9)),
            Otherwise(without="spares charged: 16 nodes (128 GPUs) on top", figure=month_saved_net(three, 16)),
            Otherwise(without="6.5 failures per 1,000 node-days (Meta)", figure=month_saved(three, at_rate(META_RATE))),
        ),
    )


def year_saved(between_h: float, minutes: float, saved_h: float, how: str) -> Figure:
    """A year of 2,048 GPUs at $3, with so many hours saved a day."""
    value = saved_h * YEAR_DAYS * LARGE_GPUS * 3.0
    text = f"{LARGE_GPUS:,} GPUs x 365 days x {how} x $3"
    formula = "N * 365 * 24/M * (L - d) * p" if between_h else "N * 365 * (lost a day before - after) * p"
    return figure(value, Unit.DOLLARS_A_YEAR, formula, text if not minutes else f"{text}, d = {minutes:g} min")


def year_saved_at(between_h: float, lost_min: float = 60, minutes: float = 3) -> Figure:
    """The same from the time between failures."""
    saved_h = 24 / between_h * (lost_min - minutes) / 60
    return year_saved(between_h, minutes, saved_h, f"24 h / {between_h:.4g} h x ({lost_min:g} - {minutes:g}) min")


def year_2048_claim() -> Claim:
    at_meta, at_llama = mttf_h(LARGE_GPUS, META_RATE), mttf_h(LARGE_GPUS, LLAMA_RATE)
    return Claim(
        name="year-2048",
        known=Known.PUBLISHED,
        verdict=Verdict.ONLY_IF,
        source=VENDOR,
        says="Migration saves more than $6 M a year on 2,048 H200.",
        needs="the job fails every 7.9 h although it has twice the GPUs; full coverage; no spares",
        inputs={"GPUs": "2,048", "price": "$3 a GPU-hour", "lost a day": "3 h before, 10 min after", "M": "7.9 h"},
        figures=(
            year_saved(0, 0, 3 - 10 / 60, "(3 h - 10 min)"),
            year_saved(0, 0, 3 * 0.95, "3 h x 95 %"),
            year_saved_at(7.9),
        ),
        fails=(
            Otherwise(without="twice the GPUs fail twice as often: M = 3.95 h", figure=year_saved_at(3.95)),
            Otherwise(without="the same, with 20 min of bring-up", figure=year_saved_at(3.95, lost_min=65)),
            Otherwise(without="M on a line between Meta's two points", figure=year_saved_at(BETWEEN_META_POINTS_H)),
            Otherwise(without="6.5 failures per 1,000 node-days (Meta)", figure=year_saved_at(at_meta)),
            Otherwise(without="3.79 failures per 1,000 node-days (Llama 3)", figure=year_saved_at(at_llama)),
        ),
    )


def gpu_hours_claim() -> Claim:
    year = 6e6 / 3
    return Claim(
        name="gpu-hours-a-year",
        known=Known.PUBLISHED,
        verdict=Verdict.NO,
        source=VENDOR,
        says="Migration saves hundreds of thousands of GPU-hours a year (with the $6 M a year).",
        needs="a month is meant, not a year",
        inputs={"saved": "$6 M a year", "price": "$3 a GPU-hour"},
        figures=(figure(year, Unit.GPU_HOURS_A_YEAR, "saved / p", "$6,000,000 / $3"),),
        fails=(
            Otherwise(
                without="counted over a month",
                figure=figure(year / 12, Unit.GPU_HOURS_A_MONTH, "saved / p / 12", "$6,000,000 / $3 / 12"),
            ),
        ),
    )


def llama3_claim() -> Claim:
    hours = LLAMA_DAYS * 24 * LLAMA_GPUS
    return Claim(
        name="llama3-gpu-hours",
        known=Known.PUBLISHED,
        verdict=Verdict.YES,
        source=f"{VENDOR}, from {LLAMA}",
        says="Llama 3 lost just over 2 M GPU-hours.",
        needs="all that was not effective training is 10 %; the report says more than 90 %, so this is the most",
        inputs={"GPUs": "16,384", "days": "54", "not effective": "10 %"},
        figures=(figure(0.1 * hours, Unit.GPU_HOURS, "share * H * N", "10 % x 54 x 24 h x 16,384 GPUs"),),
        fails=(
            Otherwise(
                without="the 47 planned stops of 466 are no failures (each stop taken to cost the same)",
                figure=figure(
                    0.1 * hours * 419 / 466,
                    Unit.GPU_HOURS,
                    "share * H * N * unexpected / all",
                    "10 % x 54 x 24 h x 16,384 GPUs x 419 / 466",
                ),
            ),
        ),
    )


def retries_claim() -> Claim:
    def retried(share: float) -> Figure:
        return month_cost(CLUSTER, replace(RESTART, retry_share=share))

    return Claim(
        name="cascading-retries",
        known=Known.PUBLISHED,
        verdict=Verdict.ONLY_IF,
        source=VENDOR,
        says="The lost hours come from restarts, cascading retries and idle recovery.",
        needs="a retry term b/(1-q), which the vendor's formula does not have: with q = 0 nothing comes from retries",
        inputs={**INPUTS, "bring-ups that fail in their turn q": "0, the formula as published"},
        figures=(month_cost(),),
        fails=(
            Otherwise(
                without="q = 11 %: so many faults come within 3 min of another (StepFun's trace)", figure=retried(0.11)
            ),
            Otherwise(
                without="q = 19 %: so many repaired nodes fail again within a day (same trace)", figure=retried(0.19)
            ),
            Otherwise(without="q = 50 %: every second bring-up fails", figure=retried(0.5)),
        ),
    )


def out_of_service_claim() -> Claim:
    def idle(share: float, how: str) -> Figure:
        nodes = share * CLUSTER.gpus / CLUSTER.gpus_per_node
        return figure(
            spares_dollars(CLUSTER, nodes),
            Unit.DOLLARS_A_MONTH,
            "share * N * H * p",
            f"{how} x 1,024 GPUs x 730 h x $3",
        )

    return Claim(
        name="out-of-service",
        known=Known.PUBLISHED,
        verdict=Verdict.ONLY_IF,
        source="one large firm, not named",
        says="About 20 % of the GPU nodes are out of service.",
        needs="one firm at one time; the trace of another has a ninth of it at its median",
        inputs={"GPUs": "1,024 (to compare)", "price": "$3 a GPU-hour", "out of service": "20 %"},
        figures=(idle(0.2, "20 %"),),
        fails=(
            Otherwise(
                without="7 of 400 nodes down at once, the median (StepFun's trace)", figure=idle(7 / 400, "7 / 400")
            ),
            Otherwise(without="31 of 400, exceeded 1 % of the time (same trace)", figure=idle(31 / 400, "31 / 400")),
        ),
    )


def spares_claim() -> Claim:
    def spares(nodes: float, cluster: Cluster = CLUSTER) -> Figure:
        text = f"{nodes:.4g} nodes x 8 GPUs x 730 h x $3"
        return figure(spares_dollars(cluster, nodes), Unit.DOLLARS_A_MONTH, "n * 8 * H * p", text)

    return Claim(
        name="no-spares",
        known=Known.PUBLISHED,
        verdict=Verdict.ONLY_IF,
        source=VENDOR,
        says="The savings are given without the spare nodes that migration needs: as if these cost nothing.",
        needs="the baseline keeps as many spares, or they do other work meanwhile",
        inputs={"GPUs": "1,024", "price": "$3 a GPU-hour", "spare nodes": "0"},
        figures=(spares(0),),
        fails=(
            Otherwise(without="one node", figure=spares(1)),
            Otherwise(without="2 % of 128 nodes (top providers keep 2 to 6 %)", figure=spares(0.02 * 128)),
            Otherwise(without="8 of 72 (GB200, GB300): the ninth part", figure=spares(128 / 9)),
            Otherwise(without="16 nodes (128 GPUs) on top of 1,024", figure=spares(16)),
            Otherwise(without="7.8 %: enough 99 % of the time (StepFun's trace)", figure=spares(0.078 * 128)),
        ),
    )


COSTS = (
    month_cost_claim, month_saved_claim, year_2048_claim, gpu_hours_claim, llama3_claim, retries_claim,
    out_of_service_claim, spares_claim,
)  # fmt: skip


# ---------------------------------------------------------------- all presets


def all_claims() -> tuple[Claim, ...]:
    """All presets, those in dollars first."""
    return tuple(make() for make in (*COSTS, *TIMES))


def claim(name: str) -> Claim:
    """One preset by its name. Raises `Unreasonable`, naming the nearest."""
    known = {each.name: each for each in all_claims()}
    if name in known:
        return known[name]
    raise Unreasonable("preset", f"no preset is called {name!r}{nearest(name, tuple(known))}")


def nearest(name: str, known: tuple[str, ...]) -> str:
    """What may have been meant; all of them if nothing is near."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f": did you mean {near[0]!r}?" if near else f": there are {', '.join(known)}"
