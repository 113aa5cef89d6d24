"""ZeroRedundancyOptimizer: each rank updates its part of the parameters, and gives it to the others after that.

What a rank's own optimizer keeps no other rank has. Its update is local, and commits like any other's; what follows it,
the gather of the parameters, is a collective behind the gate, and can be repeated: each rank sends the part that is its
own, which is right as soon as it is updated. So a gather that a fault has cut is done again, by all ranks, when they
are connected anew; who was in it stands still there until then, and its step ends as if nothing had been.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

MODULE = "torch.distributed.optim.zero_redundancy_optimizer"


def is_zero(optimizer: object) -> bool:
    """Whether this is a ZeroRedundancyOptimizer."""
    kind = getattr(sys.modules.get(MODULE), "ZeroRedundancyOptimizer", None)
    return kind is not None and isinstance(optimizer, kind)


def inside(optimizer: Any) -> list[Optimizer]:
    """The one that keeps what belongs to the parameters that this rank updates; nothing for other optimizers."""
    return [optimizer.optim] if is_zero(optimizer) and hasattr(optimizer, "optim") else []


def refusal(optimizers: list[Any]) -> tuple[str, str] | None:
    """Why these cannot be carried through a fault, and the remedy; None if they can. For protect()."""
    if len(optimizers) > 1:
        # A rank may be in the gather of the second while another one is in that of the first.
        return "there are two ZeroRedundancyOptimizers", "give one all parameters, in groups: it takes options for each"
    return next(filter(None, map(_refusal_of, optimizers)), None)


def _refusal_of(optimizer: Any) -> tuple[str, str] | None:
    if optimizer._overlap_with_ddp:
        return (
            "a ZeroRedundancyOptimizer with overlap_with_ddp=True updates in backward, before the step is committed",
            "leave overlap_with_ddp out, and call its step() after backward",
        )
    if optimizer.process_group.size() != dist.get_world_size():
        return (
            "a ZeroRedundancyOptimizer over a part of the ranks has parts of its state on several ranks, unseen",
            "leave process_group out, or use fully_shard over a mesh with a replicated dimension (HSDP)",
        )
    if not hasattr(optimizer, "_sync_params"):
        return "this torch's ZeroRedundancyOptimizer gathers parameters in an unknown way", "use torch 2.13"
    return None


def gather(optimizer: Any) -> None:
    """Give the others the parameters that this rank updates, and take theirs. Collective; it may be repeated."""
    type(optimizer)._sync_params(optimizer)


def stand_before_gather(optimizer: Any, instead: Callable[[Any], None]) -> None:
    """From now on its step() calls `instead` where it would gather."""
    optimizer._sync_params = lambda: instead(optimizer)
