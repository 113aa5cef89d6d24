"""Bill: what a way of recovering costs on a cluster over a time: failures, hours, GPU-hours, dollars, and spares."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from torchrelay.economics.formulas.loss import Recovery, linear_loss, loss_h, outage_h, renewal_ettr
from torchrelay.economics.formulas.rates import (
    GPUS_PER_NODE,
    HOURS_PER_DAY,
    HOURS_PER_MONTH,
    Counting,
    check_above,
    check_at_least,
    expected_failures,
)


class Form(StrEnum):
    """How the lost share is worked out; see `loss`."""

    LINEAR = "linear"
    RENEWAL = "renewal"


class Cluster(Struct, frozen=True, kw_only=True):
    """What is paid for, and how often it fails. `mttf_h` is of the whole job on these GPUs."""

    gpus: float = 1024
    mttf_h: float = 7.9
    price_per_gpu_hour: float = 3.0
    horizon_h: float = HOURS_PER_MONTH
    counting: Counting = Counting.WALL
    gpus_per_node: int = GPUS_PER_NODE

    def __post_init__(self) -> None:
        check_above("gpus", self.gpus, 0)
        check_above("mttf_h", self.mttf_h, 0)
        check_at_least("price_per_gpu_hour", self.price_per_gpu_hour, 0)
        check_above("horizon_h", self.horizon_h, 0)
        check_above("gpus_per_node", self.gpus_per_node, 0)


class Bill(Struct, frozen=True, kw_only=True):
    """What it comes to over the horizon. `lost_share` is above 1 where the linear form does not hold."""

    form: Form
    failures: float
    loss_per_failure_h: float  # by the formula of the linear form, in both forms
    lost_share: float
    ettr: float
    lost_h_per_day: float
    lost_gpu_hours: float
    lost_dollars: float
    spare_nodes: float
    spare_dollars: float

    @property
    def total_dollars(self) -> float:
        return self.lost_dollars + self.spare_dollars


def bill(cluster: Cluster, recovery: Recovery, form: Form = Form.LINEAR, spare_nodes: float = 0.0) -> Bill:
    """The bill of one way of recovering. Lost GPU-hours are `share * H * N`, which is `F*L*N` in the linear form.

    Raises `Unreasonable`.
    """
    if form is Form.LINEAR:
        lost = linear_loss(recovery, cluster.mttf_h, cluster.counting)
    else:
        lost = 1 - renewal_ettr(recovery, cluster.mttf_h, cluster.counting)
    gpu_hours = lost * cluster.horizon_h * cluster.gpus
    return Bill(
        form=form,
        failures=expected_failures(cluster.horizon_h, cluster.mttf_h, cluster.counting, outage_h(recovery)),
        loss_per_failure_h=loss_h(recovery),
        lost_share=lost,
        ettr=min(1.0, max(0.0, 1 - lost)),
        lost_h_per_day=lost * HOURS_PER_DAY,
        lost_gpu_hours=gpu_hours,
        lost_dollars=gpu_hours * cluster.price_per_gpu_hour,
        spare_nodes=spare_nodes,
        spare_dollars=spares_dollars(cluster, spare_nodes),
    )


def spares_dollars(cluster: Cluster, spare_nodes: float) -> float:
    """Dedicated nodes that wait: `n * 8 * H * p`. Floating ones cost the work they displace. Raises `Unreasonable`."""
    check_at_least("spare_nodes", spare_nodes, 0)
    return spare_nodes * cluster.gpus_per_node * cluster.horizon_h * cluster.price_per_gpu_hour
