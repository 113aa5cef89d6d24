"""Settings: everything that a forecast depends on, checked once; each default says where it is from."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from torchrelay.economics.formulas.intervals import young_h
from torchrelay.economics.formulas.rates import (
    GPUS_PER_NODE,
    Counting,
    Unreasonable,
    check_above,
    check_at_least,
    check_finite,
    check_share,
    mttf_h,
    unreasonable_value,
)
from torchrelay.forecast.inputs.faults import Process
from torchrelay.forecast.inputs.layouts import Layout, layout_of
from torchrelay.forecast.inputs.phases import Phases
from torchrelay.forecast.inputs.trace import Trace
from torchrelay.protocol.messages.events import JobSpec
from torchrelay.protocol.messages.ids import JobId

MINUTE_H = 1 / 60
SECOND_H = 1 / 3600
MOST_NODES = 1_000_000
MOST_FAULTS = 100_000  # of one run: a quarter of an hour with the core


class Strategy(StrEnum):
    """How a job gets over faults."""

    RESTART = "restart"  # from a checkpoint, at an interval somebody has chosen
    TUNED = "tuned"  # the same, at the best interval
    HOT_SPARE = "hot-spare"  # the same, and spares that are booted and have the program loaded: a short bring-up
    TORCHFT = "torchft"  # steps go on without the replica group that is lost; its batch is dropped
    MIGRATION = "migration"  # torchrelay: the protocol core decides
    COVERED = "covered"  # migration with a given coverage instead of a layout: the core is not asked


class Short(StrEnum):
    """What restart does when no spare is left."""

    WAIT = "wait"  # until a node is repaired
    SHRINK = "shrink"  # go on with fewer nodes


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What each strategy is assumed to take, in hours unless said."""

    save_h: float = 30 * SECOND_H  # for how long a checkpoint stops training
    interval_h: float = 1.5  # of RESTART
    detect_h: float = 0.0  # part of the bring-up in the published formula
    replacement_h: float = 10 * MINUTE_H
    restore_h: float = 5 * MINUTE_H
    startup_h: float = 5 * MINUTE_H
    hot_h: float = 5 * MINUTE_H  # whole bring-up of HOT_SPARE (Megatron at about 1,000 GPUs)
    torchft_step: float = 0.10  # how much longer each step takes
    torchft_stall_h: float = 30 * SECOND_H
    coverage: float = 0.9  # of COVERED
    covered_h: float = 2 * MINUTE_H  # pause of COVERED
    move_h: float = 30 * SECOND_H  # pause of a planned move, of COVERED
    warm_h: float = 1 * MINUTE_H  # until a fresh worker process is a warm spare
    spread: float = 0.0  # standard deviation of these times, as a share of each
    retry: float = 0.0  # share of bring-ups that fail and are begun anew

    def __post_init__(self) -> None:
        for name in (
            "save_h",
            "detect_h",
            "replacement_h",
            "restore_h",
            "startup_h",
            "hot_h",
            "torchft_step",
            "torchft_stall_h",
            "covered_h",
            "move_h",
            "warm_h",
            "spread",
        ):
            check_at_least(name, getattr(self, name), 0)
            check_finite(name, getattr(self, name))
        check_above("interval_h", self.interval_h, 0)
        check_share("coverage", self.coverage)
        check_at_least("retry", self.retry, 0)
        if not self.retry < 1:
            raise unreasonable_value("retry", self.retry, "from 0 to less than 1, or no bring-up ever succeeds")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One forecast."""

    gpus: int = 1024
    gpus_per_node: int = GPUS_PER_NODE
    hours: float = 730.0
    work_h: float | None = None  # instead: until so much is done, at full speed
    strategy: Strategy = Strategy.MIGRATION
    layout: Layout | None = None  # None: ddp
    faults: Process = field(default_factory=Process)
    gap_h: float | None = None  # mean between faults of the job; None: from the rate
    trace: Trace | None = None
    trace_file: Path = Path("trace")
    counting: Counting = Counting.WALL
    during_recovery: bool = True  # whether faults that come while nobody trains count
    spares: int | None = 2  # dedicated; None: there is always one, at once
    floating: int = 0  # nodes that other jobs can be made to give up
    preempt_h: float = 5 * MINUTE_H  # how long that takes
    displaced: float = 1.0  # what an hour of theirs is worth, as a share of ours
    preempt_lost_h: float = 0.5  # work that they lose by each preemption, hours of a node
    short: Short = Short.WAIT
    failover: bool = False  # whether the loss of one network path only slows training
    path_speed: float = 0.875  # speed of all meanwhile (one of eight paths lost)
    check_h: float = 2.0  # how long a node is out after a false alarm
    costs: Costs = field(default_factory=Costs)
    checkpoint: bool = True  # whether saves cost time
    chosen: bool = False  # the interval is as given, whatever the strategy would choose
    thinned: bool = True  # whether migration's interval is that for the faults it does not cover
    phases: Phases = field(default_factory=lambda: Phases({}))
    policy: dict[str, object] = field(default_factory=dict)  # fields of the core's JobSpec
    snapshot_steps: int = 0  # 0: none are taken
    step_s: float = 10.0
    mfu: float = 0.40
    price: float = 3.0  # dollars per GPU-hour

    def __post_init__(self) -> None:
        for name in ("hours", "price", "preempt_h", "preempt_lost_h", "check_h"):
            check_finite(name, getattr(self, name))
        check_above("hours", self.hours, 0)
        check_above("step_s", self.step_s, 0)
        check_above("path_speed", self.path_speed, 0)
        for name in ("path_speed", "mfu", "displaced"):
            check_share(name, getattr(self, name))
        for name in ("floating", "preempt_h", "preempt_lost_h", "check_h", "price", "snapshot_steps", "spares"):
            check_at_least(name, getattr(self, name) or 0, 0)
        if self.work_h is not None:
            check_above("work_h", self.work_h, 0)
        if self.gap_h is not None:
            check_above("gap_h", self.gap_h, 0)
        if self.gpus_per_node < 1:
            raise unreasonable_value("gpus_per_node", self.gpus_per_node, "it must be 1 or more")
        if self.pool + self.floating > MOST_NODES:
            what = f"the job, --spares and --floating come to {self.pool + self.floating:,} nodes"
            raise Unreasonable("gpus", f"{what}, and at most {MOST_NODES:,} are simulated")
        if self.layout is None:
            object.__setattr__(self, "layout", layout_of("ddp", self.gpus, self.gpus_per_node))
        if self.strategy is Strategy.MIGRATION and self.spares is None:
            why = "the protocol core, which migration asks, knows no unlimited spares: give a number"
            raise Unreasonable("spares", why, why)
        self.spec(1)
        self._check_length()

    def _check_length(self) -> None:
        expected = self.faults_expected()
        if expected > MOST_FAULTS:
            what = f"{expected:,.0f} faults or warnings are to be expected, and at most {MOST_FAULTS:,} are simulated"
            every = f"{self.mttf_h:.3g} h" if self.mttf_h >= 0.1 else f"{3600 * self.mttf_h:.3g} s"
            how = f"one every {every}, for {self.work_h or self.hours:,.0f} h"
            raise Unreasonable("days", f"{what} ({how}): give fewer --days or --gpus, a lower --rate, a longer --mttf")

    @property
    def nodes(self) -> int:
        return self.gpus // self.gpus_per_node

    @property
    def placed(self) -> Layout:
        assert self.layout is not None, "made above"
        return self.layout

    @property
    def pool(self) -> int:
        """Nodes that are ours: of the job, and dedicated spares."""
        return self.nodes + (self.spares or 0)

    @property
    def mttf_h(self) -> float:
        """Between faults of the job's own nodes; of a trace: in its time and on all nodes, as if they were alike."""
        if self.trace is not None:
            return self.trace.span_h / len(self.trace.entries) * (self.pool + self.floating) / self.nodes
        return mttf_h(self.nodes, self.faults.rate, 1) if self.gap_h is None else self.gap_h

    def faults_expected(self) -> float:
        """In one run, with the warnings that do not come true; a trace has as many as it has."""
        if self.trace is not None:
            return len(self.trace.entries)
        process = self.faults
        warnings = process.foreseen / process.precision - process.foreseen if process.precision else 0.0
        return (self.work_h or self.hours) / self.mttf_h * (1 + max(0.0, warnings))

    def interval_h(self) -> float:
        """Work between checkpoints: as chosen, or Young's for the faults that go back to one."""
        costs = self.costs
        if self.chosen or self.strategy is Strategy.RESTART or costs.save_h == 0:
            return costs.interval_h
        if self.strategy in (Strategy.TUNED, Strategy.HOT_SPARE):
            return young_h(costs.save_h, self.mttf_h)
        if not self.thinned:
            return costs.interval_h
        covered = costs.coverage if self.strategy is Strategy.COVERED else self.expected_coverage()
        return young_h(costs.save_h, self.mttf_h, min(covered, 0.999))

    def expected_coverage(self) -> float:
        """What an interval is chosen by: a layout without a second copy covers nothing, others nearly all."""
        return 0.0 if self.placed.replicas == 1 and not self.snapshot_steps else 0.98

    def spec(self, ranks: int) -> JobSpec:
        """The job as the core sees it: a rank stands for a node. Raises `Unreasonable` if `policy` is not its own."""
        for name, value in self.policy.items():
            check_policy(name, value)
        given = {"max_restarts": 1_000_000, **self.policy}
        return JobSpec(job=JOB, world_size=ranks, nproc_per_node=1, spares=self.spares or 0, **given)  # type: ignore[arg-type]


JOB = JobId("forecast")
_PLAIN = JobSpec(job=JOB, world_size=1, nproc_per_node=1)
# The fields that a forecast has no other word for.
_OF_THE_JOB = ("job", "world_size", "nproc_per_node", "nodes", "spares")
DEFAULT_POLICY = {name: getattr(_PLAIN, name) for name in JobSpec.__struct_fields__ if name not in _OF_THE_JOB}
# What is not here can be 0, but not less. A deadline of 0 would leave nobody the time to answer.
LEAST = {"ranks_per_slot": 1, "report_ms": 1, "ready_ms": 1, "reconfigure_ms": 1, "restore_ms": 1}
NO_LIMIT = ("moves_per_hour",)  # less than 0: any number


def check_policy(name: str, value: object) -> None:
    """Whether the core can be told so. Raises `Unreasonable`."""
    known = DEFAULT_POLICY.get(name)
    why = ""
    if known is None:
        why = f"{name!r} is not known; there are: {', '.join(sorted(DEFAULT_POLICY))}"
    elif type(value) is not type(known):
        why = f"it is to be like {known!r}"
    elif isinstance(value, int) and name not in NO_LIMIT and value < LEAST.get(name, 0):
        why = f"it must be {LEAST.get(name, 0)} or more"
    if why:
        raise Unreasonable("policy", f"policy {name}={value!r}: {why}", why)
