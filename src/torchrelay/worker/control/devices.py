"""Devices: a rank keeps its LOCAL_RANK wherever it goes, and finds the device of its slot under it.

Scripts say `cuda:LOCAL_RANK`, and expect it below LOCAL_WORLD_SIZE. So in the list of visible devices the one of the
slot changes places with the one at LOCAL_RANK, before CUDA is initialised. All devices stay visible.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torchrelay.errors import RefusedError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def arrange(env: Mapping[str, str], slot: int, local_rank: int) -> dict[str, str]:
    """What is to be set so that index `local_rank` is the device of `slot`; nothing if it is, or has no device.

    Raises `RefusedError` if the script has used CUDA before it asked for its rank.
    """
    if slot == local_rank:
        return {}
    devices = [name.strip() for name in env[VISIBLE].split(",")] if VISIBLE in env else count()
    if max(slot, local_rank) >= len(devices):
        return {}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise RefusedError(
            f"local rank {local_rank} has come to slot {slot}, and its script had used CUDA before it asked for its "
            "rank: the slot's device cannot be arranged for it any more",
            "read RANK or call init_process_group before CUDA is used",
        )
    devices[slot], devices[local_rank] = devices[local_rank], devices[slot]
    return {VISIBLE: ",".join(devices)}


def count() -> list[str]:
    """The devices of this machine by their numbers. Does not initialise CUDA."""
    torch: Any = sys.modules.get("torch")
    return [] if torch is None else [str(index) for index in range(torch.cuda.device_count())]
