"""The device: the accelerator on which this rank trains.

A process may see several. A thread of ours that does not name one would use the first, which belongs to another rank.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

ACCELERATOR = "cuda"  # torch's name for NVIDIA's and AMD's alike

_settled: torch.device | None = None


def settle(tensors: Iterable[torch.Tensor]) -> None:
    """From now on the rank's device is that of the first of these tensors which is on one."""
    global _settled
    _settled = next((tensor.device for tensor in tensors if tensor.device.type == ACCELERATOR), _settled)


def own() -> torch.device:
    """The rank's device; until it is known, the one that the script has chosen. Uses the accelerator."""
    return _settled if _settled is not None else torch.device(ACCELERATOR, torch.cuda.current_device())


def is_used() -> bool:
    """Whether this process has used an accelerator. Never begins to."""
    return torch.cuda.is_initialized()  # type: ignore[no-untyped-call,no-any-return]


def wait() -> None:
    """Until the rank's device has done all that this process has asked of it. From any thread."""
    if is_used():
        torch.cuda.synchronize(own())
