"""Telling an error of broken communication from one of the script's own.

torch has exception classes for its stores and for NCCL, but what Gloo raises is a plain RuntimeError, whether it comes
out of a collective, out of `work.wait()` or out of `backward()`. Its text names Gloo's source, or says one of the few
things below. Each of them was seen, with torch 2.13:

    a peer was killed, or its connection shut down      [.../gloo/transport/tcp/pair.cc:553] Connection closed by peer
    ours was shut down by `break_connections`           the same
    nobody answered within the group's timeout          [.../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting
    monitored_barrier                                   Rank 1 successfully reached monitoredBarrier, but ...
    the store's client was shut down                    DistNetworkError: Failed to recv, got 0 bytes; Broken pipe
    the store did not have a key in time                DistStoreError: wait timeout after 1000ms, keys: ...
    a group whose reconfigure has failed                     No backend type associated with device type cpu
    a new group was being connected                     Abandoned: connecting a new group was interrupted
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch.distributed as dist

from torchrelay.worker.process_groups.abandon import Abandoned

_TEXT = re.compile(r"/gloo/(transport|rendezvous)/|monitoredBarrier, but|No backend type associated with device type")
_CHAIN = 16  # exceptions raised while others were handled, looked at; a cycle ends there, too


def is_collective_error(error: BaseException) -> bool:
    """Whether this exception, or one that it was raised from or while handling, says that communication broke."""
    return any(_says_so(one) for one in _chain(error))


def _says_so(error: BaseException) -> bool:
    if isinstance(error, dist.DistError | Abandoned):
        return True
    return isinstance(error, RuntimeError) and _TEXT.search(str(error)) is not None


def _chain(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    for _ in range(_CHAIN):
        if current is None:
            return
        yield current
        # Also what `raise ... from None` hides from people: the step is to be redone all the same.
        current = current.__cause__ if current.__cause__ is not None else current.__context__
