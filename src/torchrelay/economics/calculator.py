"""Calculator: what failures cost and what migration saves, never as one number.

Views: as published; the same in the renewal form where the linear one is off; against a tuned baseline; with what was
measured; and at its pessimistic end. Each is also given net of spares, charged to whichever side needs them.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from torchrelay.economics.assumptions import Inputs
from torchrelay.economics.formulas.bill import Bill, Cluster, Form, bill, spares_dollars
from torchrelay.economics.formulas.intervals import thinned_h, young_h
from torchrelay.economics.formulas.loss import Recovery, is_linear, linear_loss
from torchrelay.economics.formulas.rates import Counting, mttf_h
from torchrelay.economics.measured import Measured
from torchrelay.economics.published.claims import dollars, percent, proven_share
from torchrelay.economics.published.field import META_RATE, RATES, VENDOR_GPUS, VENDOR_MTTF_H, Rate


class View(Struct, frozen=True, kw_only=True):
    """Restart against migration, under one set of assumptions. Dollars over the horizon."""

    name: str
    what: str
    restart: Recovery
    migration: Recovery
    restart_bill: Bill
    migration_bill: Bill
    saved_dollars: float  # spares left out
    net_dollars: float  # spares charged to both sides


class AtRate(Struct, frozen=True, kw_only=True):
    """The same job at a published rate. Dollars over the horizon, spares left out."""

    rate: Rate
    mttf_h: float
    headline_dollars: float  # untuned restart, linear form
    untuned_dollars: float  # renewal form and saves charged, from here on
    tuned_dollars: float
    migration_dollars: float
    saved_dollars: float  # against the tuned restart


class Answer(Struct, frozen=True, kw_only=True):
    """All of it."""

    inputs: Inputs
    cluster: Cluster
    measured: Measured | None
    views: tuple[View, ...]
    formula: tuple[tuple[str, str, str], ...]  # what, formula, with the numbers in it
    rates: tuple[AtRate, ...]
    remarks: tuple[str, ...]


def work_out(inputs: Inputs, measured: Measured | None = None) -> Answer:
    """Work everything out. Raises `Unreasonable`."""
    cluster = cluster_of(inputs)
    views = views_of(inputs, cluster, measured)
    return Answer(
        inputs=inputs,
        cluster=cluster,
        measured=measured,
        views=views,
        formula=formula(inputs, cluster, views[0]),
        rates=tuple(at_rate(inputs, measured, rate) for rate in RATES),
        remarks=remarks(inputs, cluster, measured, views),
    )


def cluster_of(inputs: Inputs) -> Cluster:
    return Cluster(
        gpus=inputs.gpus,
        mttf_h=inputs.job_mttf_h,
        price_per_gpu_hour=inputs.price_per_gpu_hour,
        horizon_h=inputs.horizon_h,
        counting=inputs.counting,
        gpus_per_node=inputs.gpus_per_node,
    )


def untuned(inputs: Inputs) -> Recovery:
    """Checkpoint-restart as it is published: no save is charged."""
    return Recovery(
        interval_h=inputs.interval_h,
        replacement_h=inputs.replacement_min / 60,
        restore_h=inputs.restore_min / 60,
        startup_h=inputs.startup_min / 60,
        retry_share=inputs.retry_share,
    )


def tuned(inputs: Inputs, between_h: float) -> Recovery:
    """Checkpoint-restart as it should be run: Young's interval, its saves charged, a hot spare."""
    save_h = inputs.save_s / 3600
    return Recovery(
        interval_h=young_h(save_h, between_h),
        save_h=save_h,
        replacement_h=inputs.hot_spare_min / 60,
        retry_share=inputs.retry_share,
    )


def headline(inputs: Inputs) -> Recovery:
    """Migration as it is published: what it does not cover restarts untuned."""
    return replace(untuned(inputs), coverage=inputs.coverage, downtime_h=inputs.downtime_min / 60)


def by_migration(
    inputs: Inputs, between_h: float, coverage: float, pause_h: float, interval_h: float | None
) -> Recovery:
    """Migration on a job that is run well: what is not covered goes back to a thinned checkpoint, on a hot spare."""
    save_h = inputs.save_s / 3600
    interval = interval_h or thinned_h(save_h, between_h, coverage, inputs.longest_interval_h)
    return replace(
        tuned(inputs, between_h),
        interval_h=interval,
        coverage=coverage,
        downtime_h=pause_h,
        step_overhead=inputs.step_overhead,
    )


def views_of(inputs: Inputs, cluster: Cluster, measured: Measured | None) -> tuple[View, ...]:
    """The views, the headline first."""
    between, pause_h = cluster.mttf_h, inputs.downtime_min / 60
    base, well = untuned(inputs), tuned(inputs, between)
    spares = (inputs.restart_spare_nodes, inputs.spares)
    linear = linear_loss(base, between, cluster.counting)
    held = "linear formula" if linear < 1 else "linear formula, WHICH DOES NOT HOLD HERE"
    found = [view("as published", f"{held}, {percent(inputs.coverage)} covered, untuned restart", cluster,
                  base, headline(inputs), Form.LINEAR, spares)]  # fmt: skip
    if not is_linear(linear):
        found.append(
            view(
                "renewal form",
                "the same, exact for failures at random",
                cluster,
                base,
                headline(inputs),
                Form.RENEWAL,
                spares,
            )
        )
    both = (inputs.spares, inputs.spares)
    best = by_migration(inputs, between, inputs.coverage, pause_h, None)
    found.append(
        view("tuned baseline", "against Young's interval and hot spares", cluster, well, best, Form.RENEWAL, both)
    )
    for name, what, after in expected(inputs, between, measured):
        found.append(view(name, what, cluster, well, after, Form.RENEWAL, both))
    return tuple(found)


def expected(inputs: Inputs, between_h: float, measured: Measured | None) -> list[tuple[str, str, Recovery]]:
    """Migration with what was measured, and at the lower bound; without a measurement, with what is promised."""
    if measured is None:
        after = likely(inputs, between_h, None)
        return [("promised", f"tuned baseline, {percent(after.coverage)} covered: nothing was measured", after)]
    after, pause_s = likely(inputs, between_h, measured), slowest_s(inputs, measured)
    ratio = measured.ratio
    worst = by_migration(inputs, between_h, ratio.low, pause_s / 3600, after.interval_h)
    return [
        (
            "measured",
            f"tuned baseline, {proven_share(ratio.share)} covered ({measured.clean} of {measured.eligible})",
            after,
        ),
        ("measured, low", f"the same, {proven_share(ratio.low)} covered, every pause the longest", worst),
    ]


def likely(inputs: Inputs, between_h: float, measured: Measured | None) -> Recovery:
    """Migration with the coverage, pause and interval that are best known: measured, else promised."""
    if measured is None:
        pause_h = (inputs.downtime_min * 60 if inputs.recovery_s is None else inputs.recovery_s) / 3600
        return by_migration(inputs, between_h, inputs.promised_coverage, pause_h, inputs.new_interval_h)
    save_h = inputs.save_s / 3600
    interval = inputs.new_interval_h or thinned_h(save_h, between_h, measured.ratio.low, inputs.longest_interval_h)
    return by_migration(inputs, between_h, measured.ratio.share, pause_of_s(inputs, measured) / 3600, interval)


def pause_of_s(inputs: Inputs, measured: Measured | None) -> float:
    """The mean recovery: by its flag, else of the ledger, else the published one."""
    if inputs.recovery_s is not None:
        return inputs.recovery_s
    found = None if measured is None else measured.recovery_mean_s
    return inputs.downtime_min * 60 if found is None else found


def slowest_s(inputs: Inputs, measured: Measured) -> float:
    """The longest recovery, likewise; never below the mean."""
    found = measured.recovery_max_s if inputs.slowest_s is None else inputs.slowest_s
    return max(pause_of_s(inputs, measured), found or 0.0)


def view(
    name: str, what: str, cluster: Cluster, before: Recovery, after: Recovery, form: Form, spares: tuple[float, float]
) -> View:
    """Both bills, and what is between them."""
    one, other = bill(cluster, before, form, spares[0]), bill(cluster, after, form, spares[1])
    return View(
        name=name,
        what=what,
        restart=before,
        migration=after,
        restart_bill=one,
        migration_bill=other,
        saved_dollars=one.lost_dollars - other.lost_dollars,
        net_dollars=one.total_dollars - other.total_dollars,
    )


def at_rate(inputs: Inputs, measured: Measured | None, rate: Rate) -> AtRate:
    """The job of the inputs at a published rate."""
    between = mttf_h(inputs.gpus, rate.per_1000_node_days, inputs.gpus_per_node)
    cluster = replace(cluster_of(inputs), mttf_h=between)
    well = bill(cluster, tuned(inputs, between), Form.RENEWAL).lost_dollars
    saving = replace(untuned(inputs), save_h=inputs.save_s / 3600)
    after = bill(cluster, likely(inputs, between, measured), Form.RENEWAL).lost_dollars
    return AtRate(
        rate=rate,
        mttf_h=between,
        headline_dollars=bill(cluster, untuned(inputs)).lost_dollars,
        untuned_dollars=bill(cluster, saving, Form.RENEWAL).lost_dollars,
        tuned_dollars=well,
        migration_dollars=after,
        saved_dollars=well - after,
    )


# ---------------------------------------------------------------- in words


def formula(inputs: Inputs, cluster: Cluster, first: View) -> tuple[tuple[str, str, str], ...]:
    """The headline's formula, line by line, with the numbers in it."""
    before, after, found = first.restart, first.migration, first.restart_bill
    running = cluster.counting is Counting.RUNNING
    gap = f"({cluster.mttf_h:.4g} + {before.bring_up_h:.4g}) h" if running else f"{cluster.mttf_h:.4g} h"
    price = f"{cluster.gpus:,.0f} GPUs x ${cluster.price_per_gpu_hour:g}"
    lost = found.loss_per_failure_h
    bring_up = "(R + S + B) / (1 - q)" if before.retry_share else "R + S + B"
    minutes = f"({inputs.replacement_min:g} + {inputs.restore_min:g} + {inputs.startup_min:g}) min"
    if before.retry_share:
        minutes += f" / (1 - {before.retry_share:g})"
    covered, downtime = after.coverage, after.downtime_h
    return (
        (
            "time between failures",
            "M" if inputs.mttf_h else f"M = 24 * 1000 / (r * N/{inputs.gpus_per_node})",
            f"{cluster.mttf_h:.4g} h"
            if inputs.mttf_h
            else f"24,000 / ({inputs.rate:.4g} x {inputs.nodes:,.4g} nodes) = {cluster.mttf_h:.4g} h",
        ),
        (
            "failures",
            "F = H/(M + b)" if running else "F = H/M",
            f"{cluster.horizon_h:g} h / {gap} = {found.failures:.4g}",
        ),
        ("lost by each", f"L = I/2 + {bring_up}", f"{before.interval_h:g} h / 2 + {minutes} = {lost:.4g} h"),
        (
            "cost of restarts",
            "F * L * N * p",
            f"{found.failures:.4g} x {lost:.4g} h x {price} = {dollars(found.lost_dollars)}",
        ),
        (
            "lost with migration",
            "Lm = c*d + (1-c)*L",
            f"{covered:g} x {downtime * 60:.4g} min + {1 - covered:.4g} x {lost * 60:.4g} min"
            f" = {first.migration_bill.loss_per_failure_h * 60:.4g} min",
        ),
        (
            "saved",
            "cost of restarts - F * Lm * N * p",
            f"{dollars(found.lost_dollars)} - {dollars(first.migration_bill.lost_dollars)}"
            f" = {dollars(first.saved_dollars)}",
        ),
        (
            "spares",
            f"n * {inputs.gpus_per_node} * H * p",
            f"{inputs.spares:g} nodes x {inputs.gpus_per_node} GPUs x {cluster.horizon_h:g} h x "
            f"${cluster.price_per_gpu_hour:g} = {dollars(first.migration_bill.spare_dollars)}",
        ),
    )


def remarks(inputs: Inputs, cluster: Cluster, measured: Measured | None, views: tuple[View, ...]) -> tuple[str, ...]:
    """What must be known to read the figures."""
    found = []
    linear = views[0].restart_bill.lost_share
    if not is_linear(linear):
        holds = (
            "it does not hold at all"
            if linear >= 1
            else f"the renewal form says {percent(views[1].restart_bill.lost_share)}"
        )
        found.append(
            f"the linear formula loses {percent(linear)} of the time, as failures come every {cluster.mttf_h:.3g} h "
            f"and each costs {views[0].restart_bill.loss_per_failure_h:.3g} h: {holds}; use the renewal form"
        )
    if inputs.mttf_h is not None and inputs.gpus != Inputs().gpus:
        found.append(
            f"{inputs.mttf_h:g} h is taken to be of a job on {inputs.gpus:,.0f} GPUs; --rate would follow --gpus"
        )
    if inputs.mttf_h is None and inputs.rate == Inputs().rate:
        found.append(
            f"no rate was given: it is {inputs.rate:.4g} per 1,000 node-days, of the published case "
            f"({VENDOR_MTTF_H:g} h on {VENDOR_GPUS:,} GPUs); torchrelay simulate starts from Meta's, {META_RATE:g}: "
            "give both your own --rate"
        )
    if measured is None:
        found.append(
            "nothing was measured: give --ledger FILE or --run-dir (or --clean and --eligible) for your own coverage"
        )
    last = next(each for each in reversed(views) if each.name != "measured, low")
    node = spares_dollars(cluster, 1)
    if node > 0:
        found.append(
            f"a node that waits costs {dollars(node)} over that time: what is saved ({last.name}) pays for "
            f"{max(0.0, last.saved_dollars) / node:.1f} of them"
        )
    found.append(
        "coverage comes from the job's layout: a shard without a second copy (FSDP, ZeRO-3, tensor parallel) is "
        "covered only as far as its snapshots reach; ask torchrelay doctor --layout"
    )
    return tuple(found)
