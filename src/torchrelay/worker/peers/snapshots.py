"""Snapshots: copies of this rank's state, on its own node and with one buddy or two, for shards without a replica.

At the first call of a generation, and then every so many steps, all is copied at the entry of the call; training goes
on while the copy travels. Before the gate of that call it has arrived. So whoever passes that gate knows that all
ranks have theirs, twice; what was taken before it is of no use any more when the next one is begun.

    entry      copy to the snapshot store; a thread sends it
    at_gate    wait until its buddies have it: that counts as being in the gate
    passed     in the first gate of a generation: clear away what others have left
    agree      in few gates: how often they are best taken, if that is to be found out (`SnapshotInterval`)
    renew      connected anew: the next call begins with a snapshot, as buddies may be others

When a rank is lost whose state nobody has, all ranks begin anew from these: `protocol.recovery.rollback`.
"""

from __future__ import annotations

import logging
import math
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from torchrelay.errors import RefusedError
from torchrelay.protocol.messages.events import Snapshot, WorkerJoined
from torchrelay.protocol.messages.ids import Generation, JobId, Point, Rank, WorkerId
from torchrelay.protocol.placement.buddies import COPIES
from torchrelay.wire.files.page import Page
from torchrelay.wire.files.snapshot_store import DIGEST, NoRoom, Sizes, SnapshotStore
from torchrelay.wire.messages.worker_frames import Welcome
from torchrelay.worker.control.agent_connection import AgentConnection
from torchrelay.worker.control.identity import Identity
from torchrelay.worker.control.position import Position
from torchrelay.worker.peers.buddies import Buddies
from torchrelay.worker.peers.parking import Forecast
from torchrelay.worker.peers.snapshot_upload import upload_snapshot
from torchrelay.worker.source.program import Program
from torchrelay.worker.state.record import with_values
from torchrelay.worker.state.state import State
from torchrelay.worker.tensors import memory
from torchrelay.worker.transfer.stream import StreamBroken
from torchrelay.worker.transfer.tls import Tls
from torchrelay.worker.transfer.transfer import Cancel

log = logging.getLogger(__name__)

EVERY = 10  # steps
AUTO = "auto"  # the interval is found out, see `SnapshotInterval`
AGAIN_S, TRIES_S = 0.05, 10.0  # between attempts to reach a buddy, and how long

ALONE = "torchrelay: {} ranks hold state that no other rank has. "
WITHOUT = (
    "If one of them is lost, all begin again (--max-restarts), or the job ends; planned moves lose nothing. "
    "Options(snapshot_every=10) keeps copies"
)
WITH = "Copies are kept every {} steps: so many are made again, at most, if one of them is lost"


def interval(given: int | str | None, *, alone: bool) -> int:
    """Steps between two snapshots, at first; 0: none. `alone`: a rank has no replica. Raises `RefusedError`."""
    if given is None or given == AUTO:
        return EVERY if alone else 0
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise RefusedError(f"snapshot_every is {given!r}", f"give a number of steps, 0 for none, or {AUTO!r}")
    return given


def buddies(given: int) -> int:
    """How many other nodes get a copy. Raises `RefusedError`."""
    if isinstance(given, bool) or given not in range(1, COPIES + 1):
        raise RefusedError(f"snapshot_buddies is {given!r}", f"give 1 to {COPIES}: how many other nodes get a copy")
    return given


def warning(alone: int, every: int) -> str:
    """What whoever starts such a job should know."""
    return ALONE.format(alone) + (WITH.format(every) if every else WITHOUT)


class Host(Protocol):
    """What snapshots need of this worker; a `Session` is one."""

    worker: WorkerId
    job: JobId
    page: Page
    position: Position
    identity: Identity
    agent: AgentConnection
    welcome: Welcome
    program: Program
    tls: Tls | None
    buddies: Buddies

    @property
    def rank(self) -> Rank: ...

    @property
    def snapshot_store(self) -> SnapshotStore: ...


class NotShelved(RuntimeError):
    """A snapshot has not come to the buddy: its connection is broken."""


class Snapshots:
    """The snapshots that this worker takes of its own rank."""

    def __init__(
        self,
        session: Host,
        state: State,
        shard: str,
        largest: Callable[[list[float]], list[float]],
        values: Callable[[], bytes],
    ) -> None:
        """`largest`: collective over all ranks, of each number the largest that any has. `values`: see `AtReturn`."""
        self._values = values
        self._session = session
        self._state = state
        self._shard = shard
        self._snapshot_store: SnapshotStore = session.snapshot_store
        self._base: Point | None = None  # from which they are counted: the first of this generation
        self._taken: Point | None = None  # before the gate that is to come
        self._settled: Point | None = None  # the newest that all ranks have; None: not known
        self.lacking = False  # what was taken is not complete: the gate tells all
        self._clears = False
        self._senders: list[_Sender] = []  # one for each buddy
        self._told = False
        self._snapshot_interval = (
            SnapshotInterval(session.identity.wait().world_size, largest) if state.snapshot_auto else None
        )
        self.idle = (
            self._snapshot_interval is None
        )  # nothing is taken, under way or being found out: gates need not ask
        forecast = Forecast(session, state, shard)
        self._forecast = forecast if forecast.wanted else None
        self._every: int | None = None  # as was agreed in this generation
        self._count = 0  # of snapshots in this generation

    @property
    def every(self) -> int:
        """Steps from one to the next; 0: none."""
        return self._state.snapshot_every if self._every is None else self._every

    def renew(self) -> None:
        """Connected anew: they are counted from the call that comes."""
        self._base, self._every, self._taken, self._count = None, None, None, 0
        if self._snapshot_interval is not None:
            self._snapshot_interval.renew()
        senders, self._senders = self._senders, []
        for sender in senders:
            sender.stop()  # not waited for: it may be reaching out for a node that is gone

    def entry(self, point: Point) -> None:
        """At the entry of the call after `point`: take one, if one is due. The state stands still."""
        every = self._state.snapshot_every if self._every is None else self._every
        if self._forecast is not None and point.step:  # from the first update on the state is as large as it gets
            forecast, self._forecast = self._forecast, None
            forecast()
        if not every or not point.step:
            return
        if self._base is None:
            self._base, self._clears = point, True
            if self._snapshot_interval is not None and self._session.rank == 0:
                self._tell()
        elif point.section or (point.step - self._base.step) % every:
            return
        if point != self._taken:  # else the call has come to nothing, and is made again
            self._count += 1
        self._taken, self.lacking, self.idle = point, False, False
        restarts = self._session.identity.wait().restarts
        what = Snapshot(Rank(self._session.rank), point, restarts)
        try:
            self._copy(what)
        except NoRoom as error:
            self._complain(str(error.strerror or error))
            self.lacking = True
            return
        for address in self._session.buddies.addresses[: self._state.snapshot_buddies]:
            self._senders.append(_Sender(self._session, what, address, self._settled))

    def at_gate(self) -> None:
        """Wait until the buddies have it. Raises `NotShelved`."""
        senders = self._senders
        if not senders:
            return
        for sender in senders:
            sender.finished.wait()
        self._senders = []
        for sender in senders:
            self._judge(sender)

    def _judge(self, sender: _Sender) -> None:
        """Whether one buddy has it. Raises `NotShelved`."""
        if sender.cancel.cancelled:
            raise NotShelved("a snapshot was cut on its way to the buddy")
        if sender.refused:
            self._complain(f"the node of the buddy at {sender.address} does not take it: {sender.refused}")
            self.lacking = True
        elif not sender.sent:
            raise NotShelved(f"a snapshot did not come to the buddy at {sender.address}: {sender.error}")

    def agree(self) -> Callable[[], None] | None:
        """What all ranks do together in this gate, if they are to find out how often snapshots are best taken."""
        snapshot_interval = self._snapshot_interval
        if snapshot_interval is None or self._taken is None or not snapshot_interval.due(self._count - 1):
            return None
        return lambda: self._settle_on(snapshot_interval.agree())

    def _settle_on(self, every: int) -> None:
        """From here on so many steps lie between two. If this gate breaks, all begin anew with the first interval."""
        if every == self.every:
            return
        self._every, self._base = every, self._taken
        if self._session.rank == 0:
            print(f"torchrelay: snapshots are taken every {every} steps from now on", file=sys.stderr, flush=True)
            self._tell()

    def _tell(self) -> None:
        """To the core, by one rank: how many steps are made again at most."""
        session = self._session
        joined = WorkerJoined(
            worker=session.worker,
            job=session.job,
            rank=session.rank,
            shard=self._shard,
            snapshot_every=self.every,
            snapshot_buddies=self._state.snapshot_buddies,
        )
        session.agent.say(joined)

    def passed(self, complete: bool | None, *, step: bool = True) -> None:
        """A gate was passed. `complete`: whether no rank lacks what was taken before it; None: nobody has told us."""
        taken, self._taken, self.lacking = self._taken, None, False
        self.idle = self._snapshot_interval is None and not self._senders
        if self._snapshot_interval is not None:  # after a roll forward the time of the outage is in it
            self._snapshot_interval.passed(snapshot=taken is not None, counts=step and complete is not None)
        if taken is None or complete is False:
            return  # the one before stays
        if complete is None:  # rolled forward: whichever the others count on, it must stay
            self._settled = None
            return
        self._settled = taken
        if self._clears:
            self._clears = False
            self._snapshot_store.clear_before(taken, self._session.identity.wait().restarts)

    def cut(self) -> int:
        """From the control thread: whoever waits for a buddy fails at once. Returns how many were cut."""
        under_way = [sender for sender in self._senders if not sender.finished.is_set()]
        for sender in under_way:
            sender.stop()
        return len(under_way)

    def _copy(self, what: Snapshot) -> None:
        """To the snapshot store of our own node. Raises `NoRoom`."""
        kept = [record.data for record in self._session.page.records() if record.point == what.point]
        private = with_values(kept[0], self._values()) if kept else b""
        head, tensors = self._state.manifest()
        sizes = Sizes(len(private), len(head), sum(map(memory.size, tensors)))
        with self._snapshot_store.begin(what, sizes, self._settled) as draft:
            draft.write(private)
            draft.write(head)
            for tensor in tensors:
                for view in memory.outgoing(tensor):
                    draft.write(view)
            draft.finish()

    def _complain(self, reason: str) -> None:
        """Once: the run goes on as it would without snapshots."""
        if not self._told:
            self._told = True
            text = f"torchrelay: rank {self._session.rank} has no complete snapshot: {reason}"
            print(text, file=sys.stderr, flush=True)


class _Sender(threading.Thread):
    """Sends one snapshot from our snapshot store to the buddy's."""

    def __init__(self, session: Host, what: Snapshot, address: str, keep: Point | None) -> None:
        super().__init__(name="torchrelay snapshot", daemon=True)
        self.address = address
        self.cancel = Cancel()
        self.finished = threading.Event()  # or given up
        self.sent = False
        self.error: Exception | None = None
        self.refused = ""
        self._session = session
        self._what = what
        self._keep = keep
        self._generation: Generation = session.position.wired
        self.start()

    def stop(self) -> None:
        """From any thread: nobody waits for it any more, and what it sends does not count."""
        self.cancel.cancel()
        self.finished.set()

    def run(self) -> None:
        try:
            self._send()
        finally:
            self.finished.set()

    def _send(self) -> None:
        kept = self._session.snapshot_store.open(self._what)
        if kept is None:
            self.refused = "it is not on our own snapshot store any more"
            return
        try:
            until = time.monotonic() + TRIES_S
            while not self.cancel.cancelled:
                try:
                    self.refused = upload_snapshot(
                        self.address,
                        self._session.welcome.secret,
                        self._generation,
                        self._what,
                        kept,
                        self._keep,
                        self.cancel,
                        self._session.tls,
                    )
                    self.sent = True
                    return
                except StreamBroken as error:
                    self.error = error
                    if time.monotonic() > until:
                        return
                    time.sleep(AGAIN_S)  # all its wards come at once, and it takes so many at a time
        except (OSError, ValueError) as error:
            self.error = error
        finally:
            kept.close()


__all__ = ["DIGEST", "EVERY", "NotShelved", "Snapshots"]


# ---------------------------------------------------------------- how often

# Steps between two snapshots, where they are to be found out (`Options(snapshot_every="auto")`).
#
# What is lost is least at about sqrt(2 C M) seconds from one to the next (J. W. Young, "A first order approximation to
# the optimum checkpoint interval", Communications of the ACM 17, 1974), where C is how much longer a step with a
# snapshot takes than one without, and M the time from one fault of the job to the next. C is measured; M comes of what
# is known of large clusters, and of the interruptions that the worker which has been there longest has seen. All ranks
# take the largest figures that any has: they tell one another in the gates of some snapshots. In each generation all
# begin anew, with the same interval.

# A rank's mean time between unexpected interruptions: 16,384 GPUs had 419 in 54 days ("The Llama 3 Herd of Models",
# 2024, section 3.3.4), which is one in 50,700 hours for each of them.
RANK_MTBF_S = 50_700 * 3600.0
MOST_S = 600.0  # of work, that is made again at most
LEAST_COST_S = 1e-4  # less than this cannot be told from the steps' own differences
FIRST, FACTOR = 3, 4  # they agree at the snapshots 3, 12, 48, ... of a generation
KEPT = 64  # steps whose times are remembered; 16 of those with snapshots


def best_interval(cost_s: float, step_s: float, mtbf_s: float) -> int:
    """Steps from one snapshot to the next; at least 1, and not more than `MOST_S` take."""
    between = min(math.sqrt(2 * max(cost_s, LEAST_COST_S) * mtbf_s), MOST_S)
    return max(1, round(between / max(step_s, 1e-6)))


def mtbf_s(world: int, faults: int, elapsed_s: float) -> float:
    """Seconds from one fault of a job to the next: what is expected of so many ranks counts as one fault seen."""
    return (RANK_MTBF_S / world + elapsed_s) / (1 + faults)


class SnapshotInterval:
    """Of one rank."""

    def __init__(
        self, world: int, largest: Callable[[list[float]], list[float]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`largest`: collective over all ranks, of each number the largest that any has."""
        self._world = world
        self._largest = largest
        self._clock = clock
        self._begun = clock()
        self._last: float | None = None
        self._plain: deque[float] = deque(maxlen=KEPT)
        self._with: deque[float] = deque(maxlen=KEPT // 4)
        self._next = FIRST
        self._wired = 0

    def renew(self) -> None:
        """A new generation, after an interruption; the first of a worker is none."""
        self._last, self._next = None, FIRST
        self._wired += 1

    def passed(self, *, snapshot: bool, counts: bool = True) -> None:
        """A gate was passed; `snapshot`: one was taken on the way to it; `counts`: that was a step and no more."""
        now = self._clock()
        if self._last is not None and counts:
            (self._with if snapshot else self._plain).append(now - self._last)
        self._last = now

    def due(self, count: int) -> bool:
        """Whether all ranks agree in the gate of this snapshot, the `count`th of the generation (from 0)."""
        return count >= self._next

    def agree(self) -> int:
        """Collective over all ranks: the interval from now on."""
        self._next *= FACTOR
        step = statistics.median(self._plain) if self._plain else 0.0
        cost = max(0.0, statistics.median(self._with) - step) if self._with else 0.0
        # Who has been here longest has seen most; a replacement knows of nothing.
        mine = [cost, step, float(max(0, self._wired - 1)), self._clock() - self._begun]
        cost, step, faults, elapsed = self._largest(mine)
        return best_interval(cost, step, mtbf_s(self._world, round(faults), elapsed))
