"""Measured: what a ledger says of a tool's recoveries from failures: how many were clean, and how long they took."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from msgspec import Struct

from torchrelay.economics.formulas.rates import Unreasonable
from torchrelay.goodput.ledger import Interval, Line, wilson
from torchrelay.protocol.model.incident import UNSETTLED, Resolution

UNPLANNED = "unplanned"
TO_A_CHECKPOINT = (Resolution.FELL_BACK, Resolution.ENDED)


class Measured(Struct, frozen=True, kw_only=True):
    """Recoveries from failures. Moves, planned and pre-emptive, are left out: nothing had failed when they began."""

    source: str
    clean: int
    eligible: int
    ratio: Interval
    recovery_p50_s: float | None
    recovery_max_s: float | None
    recovery_mean_s: float | None = None  # what costs are reckoned by: a few long ones may be most of the time
    planned: int = 0  # moves that were left out, pre-emptive ones included
    not_counted: int = 0  # users' errors, operators' stops: of the ratio they are no part
    not_counted_to_checkpoint: int = 0  # those among them that need the script's checkpoint all the same


def counted(clean: int, eligible: int, source: str) -> Measured:
    """From two numbers. Raises `Unreasonable`."""
    if not 0 <= clean <= eligible or eligible == 0:
        raise Unreasonable(
            "clean",
            f"--clean {clean} --eligible {eligible}: it takes at least one that counts, and no more clean than count",
        )
    ratio = wilson(clean, eligible)
    assert ratio is not None
    return Measured(
        source=source, clean=clean, eligible=eligible, ratio=ratio, recovery_p50_s=None, recovery_max_s=None
    )


def measure(lines: Sequence[Line], source: str, *, live: bool = False) -> Measured:
    """From a ledger. Pauses are those of clean recoveries. Raises `Unreasonable` if no failure is in it.

    `live`: its run is going on, and what is not settled is not counted yet; else it was never seen to be clean.
    """
    over = [line for line in lines if line.kind == UNPLANNED and not (live and line.resolution in UNSETTLED)]
    eligible = [line for line in over if line.eligible]
    if not eligible:
        raise Unreasonable(
            "ledger", f"{source}: no failure in its {len(lines)} lines that counts: nothing was measured yet"
        )
    clean = [line for line in eligible if line.resolution == Resolution.CLEAN and not line.steps_lost]
    others = [line for line in over if not line.eligible and line.resolution != Resolution.CALLED_OFF]
    pauses = [line.pause_ms / 1000 for line in clean if line.pause_ms is not None]
    ratio = wilson(len(clean), len(eligible))
    assert ratio is not None
    return Measured(
        source=source,
        clean=len(clean),
        eligible=len(eligible),
        ratio=ratio,
        recovery_p50_s=median(pauses) if pauses else None,
        recovery_max_s=max(pauses, default=None),
        recovery_mean_s=fmean(pauses) if pauses else None,
        planned=sum(line.kind != UNPLANNED for line in lines),
        not_counted=len(others),
        not_counted_to_checkpoint=sum(line.resolution in TO_A_CHECKPOINT for line in others),
    )
