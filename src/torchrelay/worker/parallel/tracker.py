"""Tracker: DTensor's tracker of random numbers, which all ranks make together or none.

torch makes it at the first random operation on a DTensor (dropout in a sharded region) on CUDA, and then sends the
random state of rank 0 to all: a broadcast over the default group, in the middle of a step. A replacement that made it
alone would wait for ever, or take the gate's all-reduce of the others for its broadcast. A step that is redone must
find it as it was at the entry: whoever had it already would not take part in the broadcast of the others.

It holds no numbers of its own: these are in the generators of the devices, which `random_state` carries. What must be
carried besides is whether it is there. So that is a part of the random state. Nothing of it exists on CPU.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

_MODULE = "torch.distributed.tensor._random"


def is_there() -> bool:
    """Whether this process has it."""
    module = sys.modules.get(_MODULE)
    return getattr(module, "_rng_tracker", None) is not None


def put(there: bool) -> None:
    """Make it, by ourselves and without a word to others, or take it away; one that is there already stays."""
    if there == is_there():
        return
    import torch.distributed.tensor._random as module

    tracker: Any = module
    tracker._rng_tracker = tracker.OffsetBasedRNGTracker(_Here(), run_state_sync=False) if there else None


class _Here:
    """All that the tracker asks of a mesh: it finds our device by these."""

    device_type = "cuda"

    def get_rank(self) -> int:
        """Torch takes the device of this number, modulo how many there are. After a move it is not that of our rank."""
        return torch.cuda.current_device()
