"""Forks: what an agent and its forkserver say to each other, over a unix socket, as frames of msgpack.

Every request may be made twice: an id that runs is not started again, and an id that has ended is reported again. The
forkserver is the processes' parent, so what it says about their ends is final. It keeps an end until it is told to
forget it, for an agent that comes back.
"""

from __future__ import annotations

from msgspec import Struct

from torchrelay.protocol.messages.ids import JobId, WorkerId
from torchrelay.wire.messages.codec import Codec

# ---------------------------------------------------------------- agent -> forkserver


class Fork(Struct, frozen=True, tag=True, kw_only=True):
    """Start a worker: fork, new session, stdio to `log`, then call `function` ("module:function", no arguments)."""

    worker: WorkerId
    job: JobId
    slot: int
    function: str
    argv: tuple[str, ...] = ()
    env: dict[str, str] = {}  # the whole environment
    cwd: str = "/"
    log: str  # a file; appended to


class Kill(Struct, frozen=True, tag=True, kw_only=True):
    """Send a signal to a worker and its process group. If it ends by it, `reason` is named as the cause."""

    worker: WorkerId
    signal: int
    reason: str


class Deliver(Struct, frozen=True, tag=True, kw_only=True):
    """Send a signal that came to the launcher to a worker's process alone, once for each `nth`.

    One that would end a script which has no handler for it, and is not meant to end anything, is dropped.
    """

    worker: WorkerId
    signal: int
    nth: int


class Forget(Struct, frozen=True, tag=True, kw_only=True):
    """The end of this worker has been heard by whom it concerns."""

    worker: WorkerId


class Stop(Struct, frozen=True, tag=True):
    """Kill every process and end."""


class Bide(Struct, frozen=True, tag=True, kw_only=True):
    """Keep the workers for at least so long when this agent has gone; a next one is to find them."""

    seconds: float


ToForkserver = Fork | Kill | Deliver | Forget | Bide | Stop

# ---------------------------------------------------------------- forkserver -> agent


class Child(Struct, frozen=True, tag=True, kw_only=True):
    """A worker runs."""

    worker: WorkerId
    job: JobId
    slot: int
    pid: int


class Ended(Struct, frozen=True, tag=True, kw_only=True):
    """A worker has ended, or could not be started (`pid` is None)."""

    worker: WorkerId
    slot: int
    pid: int | None
    code: int | None = None
    signal: int | None = None
    cause: str
    at_ns: int  # when, CLOCK_MONOTONIC


class Inventory(Struct, frozen=True, tag=True, kw_only=True):
    """The first message to an agent that connects: who runs, and whose end is not yet forgotten."""

    pid: int
    children: tuple[Child, ...] = ()
    ended: tuple[Ended, ...] = ()


FromForkserver = Inventory | Child | Ended

to_forkserver: Codec[ToForkserver] = Codec(ToForkserver, "request to a forkserver")
from_forkserver: Codec[FromForkserver] = Codec(FromForkserver, "report of a forkserver")
