"""The vendor's case: 1,024 GPUs, $3, a checkpoint every 1.5 h, 7.9 h between failures; and the pieces to vary it."""

from __future__ import annotations

from msgspec.structs import replace

from torchrelay.economics.formulas.bill import Bill, Cluster, Form, bill
from torchrelay.economics.formulas.intervals import young_h
from torchrelay.economics.formulas.loss import Recovery, loss_h
from torchrelay.economics.formulas.rates import HOURS_PER_DAY, Counting, mttf_h
from torchrelay.economics.published.claims import Figure, Unit, figure
from torchrelay.economics.published.field import VENDOR_GPUS, VENDOR_MTTF_H

MINUTE_H = 1 / 60
CLUSTER = Cluster(gpus=VENDOR_GPUS, mttf_h=VENDOR_MTTF_H, price_per_gpu_hour=3.0)
RESTART = Recovery(interval_h=1.5, replacement_h=10 * MINUTE_H, restore_h=5 * MINUTE_H, startup_h=5 * MINUTE_H)
SHORT_RESTART = replace(RESTART, replacement_h=5 * MINUTE_H)  # the bring-up of 15 min of other sentences: L = 60 min
SAVE_H = 30 / 3600
HOT_SPARE_H = 5 * MINUTE_H
DAY = replace(CLUSTER, horizon_h=HOURS_PER_DAY)
INPUTS = {
    "GPUs": "1,024", "price": "$3 a GPU-hour", "time between failures M": "7.9 h, of the whole job",
    "checkpoint interval I": "1.5 h", "replacement, restore, start-up R/S/B": "10/5/5 min", "month H": "730 h",
}  # fmt: skip


def migrating(minutes: float, coverage: float = 1.0, restart: Recovery = RESTART) -> Recovery:
    """The restart, with a share of the failures resolved by migration within so many minutes."""
    return replace(restart, coverage=coverage, downtime_h=minutes * MINUTE_H)


def at_rate(per_1000_node_days: float, gpus: int = VENDOR_GPUS) -> Cluster:
    """The vendor's cluster with another rate of failures."""
    return replace(CLUSTER, gpus=gpus, mttf_h=mttf_h(gpus, per_1000_node_days))


def month_cost(cluster: Cluster = CLUSTER, recovery: Recovery = RESTART) -> Figure:
    """What failures cost a month, by the linear formula."""
    found = bill(cluster, recovery)
    return figure(found.lost_dollars, Unit.DOLLARS_A_MONTH, formula_of(cluster), worked(cluster, recovery, found))


def month_saved(after: Recovery, cluster: Cluster = CLUSTER, before: Recovery = RESTART) -> Figure:
    """What migration saves a month by the linear formula, spares left out."""
    found, other = bill(cluster, before), bill(cluster, after)
    saved = found.lost_dollars - other.lost_dollars
    spans = f"({found.loss_per_failure_h:.4g} h - {other.loss_per_failure_h:.4g} h)"
    text = f"{failures_text(cluster, found)} x {spans} x {cluster.gpus:,.0f} GPUs x ${cluster.price_per_gpu_hour:g}"
    return figure(saved, Unit.DOLLARS_A_MONTH, "F * (L - Lm) * N * p", text)


def month_saved_net(after: Recovery, spare_nodes: float) -> Figure:
    """The same less the nodes that wait."""
    saved, spares = month_saved(after).value, bill(CLUSTER, after, spare_nodes=spare_nodes).spare_dollars
    text = f"${saved:,.0f} - {spare_nodes:.4g} nodes x 8 GPUs x 730 h x $3"
    return figure(saved - spares, Unit.DOLLARS_A_MONTH, "F * (L - Lm) * N * p - n * 8 * H * p", text)


def month_saved_tuned(after: Recovery) -> Figure:
    """The same against a restart that is run well: Young's interval, 30 s a save, hot spares in 5 min; renewal form."""
    tuned = Recovery(interval_h=young_h(SAVE_H, CLUSTER.mttf_h), save_h=SAVE_H, replacement_h=HOT_SPARE_H)
    before, better = bill(CLUSTER, tuned, Form.RENEWAL), bill(CLUSTER, after, Form.RENEWAL)
    text = f"({better.ettr:.4f} - {before.ettr:.4f}) x 730 h x 1,024 GPUs x $3"
    return figure(before.lost_dollars - better.lost_dollars, Unit.DOLLARS_A_MONTH, "(ETTRm - ETTR) * H * N * p", text)


def day_lost(recovery: Recovery, cluster: Cluster = DAY) -> Figure:
    """Hours lost a day."""
    text = f"24 h / {cluster.mttf_h:.4g} h x {loss_h(recovery):.4g} h"
    return figure(bill(cluster, recovery).lost_h_per_day, Unit.HOURS_A_DAY, "24/M * (I/2 + b)", text)


def day_lost_minutes(recovery: Recovery) -> Figure:
    """Minutes lost a day."""
    minutes = 60 * loss_h(recovery)
    text = f"24 h / {DAY.mttf_h:.4g} h x {minutes:.4g} min"
    return figure(60 * bill(DAY, recovery).lost_h_per_day, Unit.MINUTES_A_DAY, "24/M * (c*d + (1-c)*L)", text)


def formula_of(cluster: Cluster) -> str:
    """The linear formula, as M is counted."""
    return "H/(M + b) * (I/2 + b) * N * p" if cluster.counting is Counting.RUNNING else "H/M * (I/2 + b) * N * p"


def failures_text(cluster: Cluster, found: Bill) -> str:
    outage = cluster.horizon_h / found.failures - cluster.mttf_h
    gap = f"{cluster.mttf_h:.4g} h" if outage < 1e-9 else f"({cluster.mttf_h:.4g} h + {outage:.4g} h)"
    return f"{cluster.horizon_h:g} h / {gap} = {found.failures:.4g} failures"


def worked(cluster: Cluster, recovery: Recovery, found: Bill) -> str:
    """The linear formula with the numbers in it."""
    loss = f"({recovery.interval_h / 2:.4g} h + {recovery.bring_up_h:.4g} h)"
    return f"{failures_text(cluster, found)} x {loss} x {cluster.gpus:,.0f} GPUs x ${cluster.price_per_gpu_hour:g}"
