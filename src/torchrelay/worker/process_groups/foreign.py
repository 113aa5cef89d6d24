"""Foreign groups: of backends that we do not reconfigure. They are made as torch makes them, and let be.

Frameworks make groups of the backend `fake` for dimensions of size 1 of a mesh: nobody is there to talk to. One that
does talk to others could not be connected again after a fault, so `protect()` refuses it; a script that never joins may
have what it likes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch._C._distributed_c10d import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from torchrelay.worker.process_groups.counts import GLOO
from torchrelay.worker.process_groups.path_groups import PATHS

NCCL = "nccl"
OURS = frozenset({GLOO, NCCL, PATHS})  # those that can be reconfigured
FAKE = "fake"  # its collectives do nothing

_world: Any = c10d._world


def kinds_in(config: str) -> frozenset[str]:
    """The backends in torch's configuration of a group, such as 'cpu:gloo,cuda:nccl'."""
    return frozenset(pair.rpartition(":")[2] for pair in config.split(","))


def is_foreign(config: str) -> bool:
    return not kinds_in(config) <= OURS


def communicates(config: str, size: int) -> bool:
    """Whether a foreign group of so many ranks talks to anybody."""
    return size > 1 and kinds_in(config) != {FAKE}


def groups() -> Iterator[tuple[ProcessGroup, str]]:
    """The foreign groups that this rank belongs to, with torch's configuration of each."""
    for group in _world.pg_map:
        config = _world.pg_backend_config[group]
        if is_foreign(config):
            yield group, config


def refusal(config: str, size: int, *, default: bool = False) -> tuple[str, str]:
    """What is wrong with a group, and what to do."""
    names = ", ".join(sorted(kinds_in(config) - OURS))
    which = "the default group" if default else f"a group of {size} ranks"
    reason = f"{which} has the backend {names}, which cannot be connected again after a fault"
    return reason, f"use gloo, nccl or {PATHS} for groups of several ranks"
