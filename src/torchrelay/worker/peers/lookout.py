"""Lookout: where the main thread stands, seen from the control thread, when nothing has changed for a while.

Nothing of it is done while training gets on: the stack of the main thread is read only when the worker has begun
nothing and entered nothing since the look before. What is in the page then is where a rank stands for others
(`protocol/health/ways`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from torchrelay.protocol.health.ways import BACKWARD, Spot
from torchrelay.protocol.messages.ids import WorkerPhase
from torchrelay.worker.control.standing import Standing
from torchrelay.worker.process_groups import groups
from torchrelay.worker.source.lines import is_library

# Of torch.distributed: what all members of a group make together, and blocks.
COLLECTIVES = frozenset(
    {
        "all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_into_tensor", "all_gather_coalesced",
        "reduce_scatter", "reduce_scatter_tensor", "reduce", "broadcast", "gather", "scatter", "all_to_all",
        "all_to_all_single", "barrier", "monitored_barrier", "all_gather_object", "gather_object",
        "broadcast_object_list", "scatter_object_list", "_new_group_with_tag",
    }
)  # fmt: skip
DIRECT = frozenset({"send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list"})
_C10D = "torch/distributed/distributed_c10d.py"
_BACKWARD = ("torch/autograd/graph.py", "_engine_run_backward")
_NAMES = {"_new_group_with_tag": "new_group"}


class Lookout:
    """Looks at the main thread of this process."""

    def __init__(self, standing: Standing) -> None:
        self._standing = standing
        self._seen: tuple[object, ...] = ()
        self._spot: Spot | None = None

    def look(self, collectives: int, elsewhere: Sequence[tuple[int, int]] | None) -> None:
        """Called with every sign of life: says where the main thread stands, if it has not got on since the last."""
        standing = self._standing
        seen = (standing.phase, standing.entered_ns, standing.committed, collectives, elsewhere)
        if seen != self._seen:
            self._seen, self._spot = seen, None
            return
        spot = self._see()
        if spot != self._spot:
            self._spot = spot
            standing.mark_spot(spot)

    def _see(self) -> Spot:
        standing = self._standing
        if standing.phase is WorkerPhase.FINISHED:
            return Spot(line=standing.ended_at)
        frames = list(stack())
        call, group, direct = communication(frames)
        return Spot(line=line_in(frames), call=call, group=group, direct=direct, kind=standing.kind)


def stack() -> Iterator[FrameType]:
    """The frames of the main thread, the innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def line_in(frames: Sequence[FrameType]) -> str:
    """The innermost line of the script itself; empty if there is none."""
    for frame in frames:
        if not is_library(frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    return ""


def communication(frames: Sequence[FrameType]) -> tuple[str, int, bool]:
    """Which function of torch communicates, the key of its group, and whether it is from one rank to another.

    An empty name if none does, or none that is known, or in a group that nobody counts.
    """
    for frame in frames:
        code = frame.f_code
        if code.co_filename.endswith(_C10D) and code.co_name in COLLECTIVES | DIRECT:
            key = _group_of(frame)
            name = _NAMES.get(code.co_name, code.co_name)
            return ("", 0, False) if key is None else (name, key, code.co_name in DIRECT)
        if code.co_filename.endswith(_BACKWARD[0]) and code.co_name == _BACKWARD[1]:
            return BACKWARD, 0, False
        if not is_library(code.co_filename):
            break
    return "", 0, False


def _group_of(frame: FrameType) -> int | None:
    if frame.f_code.co_name in _NAMES:
        return 0  # a new group is made by all
    group = frame.f_locals.get("group")
    if not isinstance(group, dist.ProcessGroup):
        return 0  # none was named
    return groups.key_of(group)
