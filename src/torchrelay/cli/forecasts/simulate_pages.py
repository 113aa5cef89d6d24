"""Pages of `torchrelay simulate`: tables of forecasts, of a sweep, of published cases, and of a trace."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torchrelay.cli.forecasts.simulate_benchmark import Benchmark
from torchrelay.forecast.inputs.describe import Description
from torchrelay.forecast.inputs.settings import Settings, Strategy
from torchrelay.forecast.play.buckets import Bucket
from torchrelay.forecast.presets import WITHIN, Cell, Row
from torchrelay.forecast.results import Forecast, Mean
from torchrelay.forecast.sweep import Swept
from torchrelay.terminal.show import milliseconds, table


def with_interval(mean: Mean, digits: int = 4) -> str:
    """0.9812 ±0.0003."""
    half = "" if mean.high is None else f" ±{mean.high - mean.mean:.{digits}f}"
    return f"{mean.mean:.{digits}f}{half}"


def dollars(value: float) -> str:
    return f"${value / 1e6:,.2f} M" if value >= 1e6 else f"${value:,.0f}"


def forecasts_page(found: Sequence[Forecast], settings: Settings) -> str:
    """One row a strategy, then where the time goes, then what was assumed."""
    heads = ("strategy", "ETTR", "goodput", "time for the work", "step MFU", "job MFU", "stops", "clean", "rollbacks",
             "ended", "pause p50", "longest", "interval", "lost", "spares")  # fmt: skip
    rows = [row_of(one) for one in found]
    parts = [job_line(settings, found[0].runs), table(heads, rows), buckets_table(found), spares_table(found)]
    if any(one.strategy is Strategy.MIGRATION for one in found):
        parts.append(f"migration: decided by the protocol core; phases: {settings.phases.source}")
    if settings.trace is not None and max(one.outcomes[0].wall_h for one in found) > settings.trace.span_h + 1e-6:
        parts.append(f"the trace ends after {settings.trace.span_h / 24:.4g} days: nothing fails after that")
    if found[0].runs == 1:
        parts.append("one run: no confidence interval (--runs)")
    return "\n\n".join(parts)


def row_of(one: Forecast) -> tuple[object, ...]:
    means = one.means
    return (
        one.strategy,
        with_interval(means["ettr"]),
        with_interval(means["goodput"]),
        work_text(means["jct_h"].mean),
        f"{means['step_mfu'].mean:.1%}",
        f"{means['job_mfu'].mean:.1%}",
        f"{means['interruptions'].mean:,.1f}",
        f"{means['clean'].mean:,.1f}",
        f"{means['rollbacks'].mean + means['back_to_snapshots'].mean:,.1f}",
        f"{means['ended'].mean:,.1f}",
        *(pause_text(one, name) for name in ("pause_p50_s", "pause_max_s")),
        "-" if one.interval_h is None else milliseconds(3.6e6 * one.interval_h),
        dollars(means["lost_dollars"].mean),
        dollars(means["spare_dollars"].mean),
    )


def work_text(hours: float) -> str:
    return "never" if math.isinf(hours) else f"{hours:,.1f} h"


def days_text(hours: float) -> str:
    return milliseconds(3.6e6 * hours) if hours < 24 else f"{round(hours / 24, 2):,.10g} days"


def pause_text(one: Forecast, name: str) -> str:
    """A pause; of runs that never stood there is none."""
    stood = any(getattr(outcome, name) is not None for outcome in one.outcomes)
    return milliseconds(1000 * one.means[name].mean) if stood else "-"


def job_line(settings: Settings, runs: int) -> str:
    span = days_text(settings.hours) if settings.work_h is None else f"{settings.work_h:,.1f} h of work"
    spares = "unlimited spares" if settings.spares is None else f"{settings.spares} dedicated spares"
    return (
        f"{settings.gpus:,} GPUs ({settings.nodes:,} nodes), {span}, {faults_text(settings)}, {spares}, "
        f"{settings.floating} floating; layout {settings.placed.name}: {settings.placed.replicas} copies of the state; "
        f"{runs} runs, ± is the 95 % confidence interval"
    )


def faults_text(settings: Settings) -> str:
    """How often something fails, and which time that counts."""
    if settings.trace is not None:
        return f"trace {settings.trace_file} ({settings.counting} time)"
    if math.isinf(settings.mttf_h):
        return "no faults"
    between = f"{settings.mttf_h:,.2f} h" if settings.mttf_h >= 1 else milliseconds(3.6e6 * settings.mttf_h)
    return f"a fault every {between} ({settings.counting} time)"


def buckets_table(found: Sequence[Forecast]) -> str:
    """Shares of the wall time; buckets that are 0 for all are left out."""
    seen = [bucket for bucket in Bucket if any(one.buckets[bucket].mean > 0 for one in found)]
    heads = ("share of the time", *(one.strategy for one in found))
    rows = [("productive", *(f"{one.means['ettr'].mean:.3%}" for one in found))]
    rows += [(bucket, *(f"{one.buckets[bucket].mean:.3%}" for one in found)) for bucket in seen]
    return table(heads, rows)


def spares_table(found: Sequence[Forecast]) -> str:
    """What spares were used for."""
    heads = ("spares", "taken", "preempted", "node-hours of others", "hours waited for a node", "most nodes down",
             "moves", "false alarms")  # fmt: skip
    names = ("spares_taken", "preempted", "borrowed_node_h", "waited_h", "most_down", "moves", "alarms")
    return table(heads, [(one.strategy, *(f"{one.means[name].mean:,.1f}" for name in names)) for one in found])


def sweep_page(found: Sequence[Swept]) -> str:
    """ETTR and what was lost, one row a value."""
    ways = [one.strategy for one in found[0].forecasts]
    heads = (found[0].name, *(f"ETTR {way}" for way in ways), *(f"lost + spares {way}" for way in ways))
    rows = [
        (
            f"{one.value:g}",
            *(with_interval(got.means["ettr"]) for got in one.forecasts),
            *(dollars(got.means["lost_dollars"].mean + got.means["spare_dollars"].mean) for got in one.forecasts),
        )
        for one in found
    ]
    return table(heads, rows)


def cells_page(cells: Sequence[Cell]) -> str:
    """The published table beside ours; where they differ by more than 0.01, why."""
    heads = ("GPUs", "rate", "MTTF h", "way", "published", "ours", "95 %", "exact", "difference", "published ±")
    rows = [
        (
            f"{one.gpus:,}",
            one.rate,
            f"{one.mttf_h:.2f}",
            one.column,
            one.published,
            f"{one.ours:.4f}",
            f"{one.low:.4f} to {one.high:.4f}",
            f"{one.exact:.4f}",
            f"{one.difference:+.4f}{'' if one.within else ' !'}",
            f"{1.96 * one.published_error:.3f}",
        )
        for one in cells
    ]
    far = [one for one in cells if not one.within]
    text = f"{len(cells) - len(far)} of {len(cells)} cells within {WITHIN}"
    if far:
        beyond = [one for one in far if abs(one.difference) > 1.96 * one.published_error + WITHIN / 2]
        most = max(abs(one.difference) for one in far)
        text += (
            f"; {len(far)} marked ! are not, and differ by up to {most:.3f}. The published table is headed ±0.01. A "
            "published cell is a sample of 60 mean times x 3 runs: `published ±` is the 95 % error of such a sample, "
            "measured with ours; `exact` is renewal theory for a run without end, without any sample. "
            f"{len(far) - len(beyond)} of the {len(far)} differ by less than `published ±` (and rounding)."
        )
    return f"{table(heads, rows)}\n\n{text}"


WHY_FULL = """The full model has what the table leaves out: faults in wall time, also during a recovery; bursts
(Weibull gaps of shape 0.62); lemons; log-normal repairs (median 20 h, mean 133 h) and refailures; dedicated and
floating spares that can run out (as many as are down at once for 99 % of the time, if nodes failed by themselves);
faults of processes and of network paths; saves that cost time, thinned for migration. Migration is decided by the
protocol core on a ddp layout, so its coverage is not a constant; its phases are assumed to take 120 s in all."""


def rows_page(rows: Sequence[Row]) -> str:
    """The full model beside hot-spare restart in the same world."""
    heads = ("GPUs", "rate", "full model: migration", "clean of incidents", "full model: tuned, hot spare")
    found = [
        (
            f"{one.gpus:,}",
            one.rate,
            with_interval(one.migration.means["ettr"]),
            f"{one.migration.means['clean'].mean:.1f} of {incidents(one.migration):.1f}",
            with_interval(one.hot_spare.means["ettr"]),
        )
        for one in rows
    ]
    return f"{table(heads, found)}\n\n{WHY_FULL}"


def incidents(one: Forecast) -> float:
    return sum(one.means[name].mean for name in ("clean", "rollbacks", "back_to_snapshots"))


def benchmark_page(cases: Sequence[Benchmark]) -> str:
    """The published benchmark: the order, from parameters that its minutes imply."""
    heads = ("64 GPUs, 3,000 steps", "published min", "ours min", "stops", "with")
    rows = [
        (
            one.name,
            one.published_minutes,
            with_interval(one.minutes, 0),
            f"{one.forecast.means['interruptions'].mean:.1f}",
            one.implied,
        )
        for one in cases
    ]
    order = " < ".join(one.name for one in sorted(cases, key=lambda one: one.minutes.mean))
    return (
        f"{table(heads, rows)}\n\norder: {order}. The parameters are worked back from the published minutes, "
        "and were not published; so only the order says something."
    )


def description_page(found: Description) -> str:
    """What a trace says."""

    def shown(value: float | None, how: str = ".2f") -> str:
        return "too few" if value is None else format(value, how)

    rows = [
        ("faults", f"{found.faults} on {found.nodes} nodes in {found.span_days:.1f} days"),
        ("rate", f"{found.rate:.2f} per 1,000 node-days"),
        ("gaps", f"coefficient of variation {shown(found.gap_cv)}, Weibull shape {shown(found.weibull_shape)}"),
        ("bursts", f"{found.in_burst:.1%} begin within 3 min of the one before; up to {found.largest_burst} nodes"),
        ("lemons", f"{found.never_failed} nodes never failed, the worst {found.worst_node} times; "
                   f"variance/mean {found.dispersion:.2f}"),
        ("fail again", f"{shown(found.refail_day, '.1%')} within a day of the repair, "
                       f"{shown(found.refail_week, '.1%')} within 7 days"),
        ("repair", f"median {shown(found.repair_median_h, '.1f')} h, mean {shown(found.repair_mean_h, '.1f')} h, "
                   f"p90 {shown(found.repair_p90_h, '.1f')} h"),
        ("down at once", f"median {found.down_p50:.0f}, p95 {found.down_p95:.0f}, p99 {found.down_p99:.0f} nodes"),
        ("dedicated spares", f"{found.spares_99:.2%} of the nodes are enough for 99 % of the time"),
    ]  # fmt: skip
    causes = table(("cause", "faults"), [*list(found.causes.items())[:20]])
    return f"{table(('what', 'trace'), rows)}\n\n{causes}"
