"""Assumptions: every input of the calculator with its default, its unit and where the default is from."""

from __future__ import annotations

import math
from enum import StrEnum

from msgspec import Struct

from torchrelay.economics.formulas.rates import GPUS_PER_NODE, HOURS_PER_MONTH, Counting, Unreasonable, mttf_h
from torchrelay.economics.published.field import META_RATE, RATES, VENDOR

OURS = "torchrelay's choice"


class Bound(StrEnum):
    """What a number must be."""

    POSITIVE = "above 0"
    NOT_NEGATIVE = "0 or more"
    SHARE = "a share, from 0 to 1"
    BELOW_ONE = "from 0 to less than 1"
    COUNTING = "wall or running"


class Assumption(Struct, frozen=True, kw_only=True):
    """One input: the field of `Inputs`, and so the flag."""

    field: str
    unit: str
    bound: Bound
    what: str
    source: str
    unset: str = ""  # what is taken if there is no default

    @property
    def flag(self) -> str:
        return "--" + self.field.replace("_", "-")


class Inputs(Struct, frozen=True, kw_only=True):
    """What the calculator works with. Units in the names; for the meaning of each see `ASSUMPTIONS`."""

    gpus: int = 1024
    gpus_per_node: int = GPUS_PER_NODE
    price_per_gpu_hour: float = 3.0
    rate: float = RATES[0].per_1000_node_days
    mttf_h: float | None = None
    counting: Counting = Counting.WALL
    horizon_h: float = HOURS_PER_MONTH
    interval_h: float = 1.5
    replacement_min: float = 10.0
    restore_min: float = 5.0
    startup_min: float = 5.0
    retry_share: float = 0.0
    save_s: float = 30.0
    hot_spare_min: float = 5.0
    coverage: float = 1.0
    downtime_min: float = 3.0
    promised_coverage: float = 0.9
    step_overhead: float = 0.0
    spare_share: float = 0.02
    spare_nodes: float | None = None
    restart_spare_nodes: float = 0.0
    new_interval_h: float | None = None
    longest_interval_h: float = 24.0
    recovery_s: float | None = None
    slowest_s: float | None = None

    def __post_init__(self) -> None:
        for each in ASSUMPTIONS:
            check(each, getattr(self, each.field))
        if self.gpus % self.gpus_per_node:
            why = f"nodes have {self.gpus_per_node} GPUs and are replaced as a whole, so give a multiple of that"
            raise Unreasonable("gpus", f"--gpus {self.gpus:g}: {why}", why, f"{self.gpus:g}")

    @property
    def job_mttf_h(self) -> float:
        """Of the job: as given, or from the rate and the number of GPUs. A rate of 0 is refused: nothing would cost."""
        return mttf_h(self.gpus, self.rate, self.gpus_per_node) if self.mttf_h is None else self.mttf_h

    @property
    def nodes(self) -> float:
        return self.gpus / self.gpus_per_node

    @property
    def spares(self) -> float:
        """Whole nodes that wait: as given, or the share of the job's nodes, rounded up."""
        return math.ceil(self.spare_share * self.nodes - 1e-9) if self.spare_nodes is None else self.spare_nodes


def check(assumption: Assumption, value: object) -> None:
    """Whether a value can be. Raises `Unreasonable`."""
    if value is None or isinstance(value, str):
        return
    assert isinstance(value, int | float)
    if not math.isfinite(value):
        raise refusal(assumption, value, "it must be a finite number")
    match assumption.bound:
        case Bound.POSITIVE:
            good = value > 0
        case Bound.NOT_NEGATIVE:
            good = value >= 0
        case Bound.SHARE:
            good = 0 <= value <= 1
        case Bound.BELOW_ONE:
            good = 0 <= value < 1
        case Bound.COUNTING:
            good = True
    if not good:
        raise refusal(assumption, value, f"it must be {assumption.bound}")


def refusal(assumption: Assumption, value: float, why: str) -> Unreasonable:
    """In the words of the flag."""
    return Unreasonable(assumption.field, f"{assumption.flag} {value:g}: {why}", why, f"{value:g}")


def made(field: str, unit: str, bound: Bound, what: str, source: str, unset: str = "") -> Assumption:
    return Assumption(field=field, unit=unit, bound=bound, what=what, source=source, unset=unset)


ASSUMPTIONS = (
    made("rate", "failures per 1,000 node-days", Bound.POSITIVE,
         f"how often nodes fail: a number, or a published rate by its name ({', '.join(r.name for r in RATES)})",
         f"{VENDOR}: 7.9 h on 1,024 GPUs; Meta's is {META_RATE:g} (which torchrelay simulate takes), Llama 3's 3.79: "
         "use your own"),
    made("mttf_h", "h", Bound.POSITIVE, "time between failures of the whole job on these GPUs, in place of --rate",
         "--rate and --gpus", "24,000 / (rate * nodes)"),
    made("counting", "", Bound.COUNTING, "what that time counts: wall (all time), or running (recoveries left out)",
         f"{VENDOR}: reproduces its headline"),
    made("gpus", "GPUs", Bound.POSITIVE, "GPUs of the job", VENDOR),
    made("gpus_per_node", "GPUs", Bound.POSITIVE, "GPUs of a node; it fails and is replaced as a whole", "HGX nodes"),
    made("price_per_gpu_hour", "$", Bound.NOT_NEGATIVE, "what a GPU costs an hour", VENDOR),
    made("horizon_h", "h", Bound.POSITIVE, "the time that is reckoned with", "a month: 365 * 24 / 12"),
    made("interval_h", "h", Bound.POSITIVE, "from checkpoint to checkpoint, untuned baseline", VENDOR),
    made("replacement_min", "min", Bound.NOT_NEGATIVE, "until there is another node, untuned baseline", VENDOR),
    made("restore_min", "min", Bound.NOT_NEGATIVE, "until the checkpoint is read, untuned baseline", VENDOR),
    made("startup_min", "min", Bound.NOT_NEGATIVE, "until the job trains again, untuned baseline", VENDOR),
    made("retry_share", "share", Bound.BELOW_ONE, "bring-ups that fail in their turn (cascading retries)",
         f"{VENDOR}: its formula has none; StepFun's trace suggests 0.11"),
    made("save_s", "s", Bound.POSITIVE, "how long a save blocks training; not charged in the headline, as published",
         f"{OURS}: measure yours"),
    made("hot_spare_min", "min", Bound.NOT_NEGATIVE, "bring-up of a tuned restart on a hot spare",
         "restart of Megatron at 1,000 GPUs"),
    made("coverage", "share", Bound.SHARE, "failures resolved by migration, in the headline",
         f"{VENDOR}: what its figures need"),
    made("downtime_min", "min", Bound.NOT_NEGATIVE, "pause of a migration after a failure, in the headline", VENDOR),
    made("promised_coverage", "share", Bound.SHARE, "coverage where nothing was measured", f"{VENDOR}: its promise"),
    made("step_overhead", "share", Bound.NOT_NEGATIVE, "by how much migration makes steps longer, tuned and measured",
         f"{OURS}: measure yours (make bench NAME=overhead)"),
    made("spare_share", "share", Bound.NOT_NEGATIVE, "nodes that wait, of the job's nodes, rounded up",
         "top providers keep 2 to 6 %; StepFun's trace asks for 7.8 %"),
    made("spare_nodes", "nodes", Bound.NOT_NEGATIVE, "nodes that wait, in place of --spare-share", "--spare-share",
         "spare share * nodes"),
    made("restart_spare_nodes", "nodes", Bound.NOT_NEGATIVE, "nodes that wait for the untuned baseline",
         f"{OURS}: it asks the provider for one"),
    made("new_interval_h", "h", Bound.POSITIVE, "from checkpoint to checkpoint with migration, measured",
         "--advise", "thinned for the lower bound"),
    made("longest_interval_h", "h", Bound.POSITIVE, "no advice is longer: a checkpoint is insurance, too",
         f"{OURS}: one a day"),
    made("recovery_s", "s", Bound.NOT_NEGATIVE, "mean pause of a recovery, measured",
         "--ledger or --run-dir", "downtime"),
    made("slowest_s", "s", Bound.NOT_NEGATIVE, "longest pause of a recovery, measured",
         "--ledger or --run-dir", "recovery"),
)  # fmt: skip
