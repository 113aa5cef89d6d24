"""The connection to the agent: the control thread. It hears orders while the main thread computes, answers at once, and
breaks what blocks.

Assign      the rank: `Identity`
Interrupt   promise and report, then break our connections until the main thread is out of them
Halt        promise and report; nothing is broken
Recall      what we keep as a buddy, at once
PassOn      end by a signal that we would outlive otherwise: see `schedulers.lasting`
Resume      answered here if a halt is called off before the main thread has stopped for it
the rest    kept in `Position` for the main thread; what was obeyed already is answered again
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Generic, TypeVar

import torch.distributed as dist

from torchrelay.protocol.health.stalls import BACKWARD, Spot
from torchrelay.protocol.messages.events import (
    Answer,
    Event,
    RecordKept,
    RestoreFailed,
    Snapshot,
    WorkerReported,
    WorkerResumed,
    age_event,
)
from torchrelay.protocol.messages.ids import JobId, Point, Rank, WorkerId, WorkerPhase
from torchrelay.protocol.messages.orders import (
    Assign,
    Halt,
    Interrupt,
    PassOn,
    Recall,
    Replay,
    Restore,
    Resume,
    WorkerOrder,
)
from torchrelay.schedulers.lasting import end_by
from torchrelay.wire.messages.codec import WireError, encode
from torchrelay.wire.messages.framing import Closed, FrameSocket
from torchrelay.wire.messages.worker_frames import Welcome, decode_to_worker
from torchrelay.worker.control.identity import CONTROL_THREAD, Identity
from torchrelay.worker.control.position import Position, Report
from torchrelay.worker.hardware.niceness import Niceness
from torchrelay.worker.process_groups import groups
from torchrelay.worker.source.lines import is_library

log = logging.getLogger(__name__)

BEAT_S = 0.5  # between signs of life in the page: the main thread stands aside for each
BREAK_S = 0.02  # between two breaks while the main thread may still be blocked
BREAKS = 50  # after so many in a row it computes rather than waits, and one beat in so many is enough:
BEATS = 2
CONNECT_S = 0.05  # between attempts to reach an agent that is gone
GREETING_S = 30.0  # how long the agent may take to welcome us
SEND_S = 5.0  # how long the agent may not read before its connection counts as gone
EXIT_DEFECT = 95
E = TypeVar("E", bound=Event)


@dataclass
class Reach:
    """What the control thread may touch: replaced in tests."""

    break_connections: Callable[[], int]
    collectives: Callable[[], int]
    # What was begun in all groups but the default one; None if that cannot be told.
    elsewhere: Callable[[], Sequence[tuple[int, int]] | None] = field(default=lambda: ())
    cancel: Callable[[], None] = field(default=lambda: None)  # cuts a transfer of the main thread
    kept: Callable[[Rank, Point, int], bytes] = field(default=lambda *_: b"")  # a copy of a ward's private record
    snapshot_store: Callable[[], tuple[Snapshot, ...] | None] = field(
        default=lambda: ()
    )  # what is in the memory of the node
    # Says where the main thread stands, if nothing was begun since the last look.
    look: Callable[[int, Sequence[tuple[int, int]] | None], None] = field(default=lambda *_: None)


@dataclass(frozen=True, slots=True)
class Said(Generic[E]):
    """Something that was said, and when."""

    event: E
    at_ns: int = field(default_factory=time.monotonic_ns)

    def again(self) -> Event:
        """The event as it is to be repeated now."""
        return age_event(self.event, (time.monotonic_ns() - self.at_ns) // 1_000_000)


class NotWelcome(Exception):
    """The agent did not welcome us: there is nothing that this worker could do."""


class AgentConnection:
    """The connection to the agent."""

    def __init__(self, path: Path, worker: WorkerId, job: JobId, position: Position, identity: Identity) -> None:
        self._path = path
        self._worker = worker
        self._job = job
        self._position = position
        self._identity = identity
        self._socket: FrameSocket | None = None
        self._lock = threading.Lock()  # of what was said
        self._facts: list[Said[Event]] = []
        self._answers: dict[type[WorkerOrder], Said[Answer]] = {}
        self._reported: Report | None = None
        self._reach: Reach | None = None
        self._niceness = Niceness()

    # ------------------------------------------------------------ the main thread

    def connect(self) -> Welcome:
        """Reach the agent for the first time. Raises `NotWelcome`."""
        try:
            self._socket = FrameSocket(self._dial())
            data = self._socket.receive(GREETING_S)
            welcome = decode_to_worker(data) if data is not None else None
        except (OSError, Closed, WireError) as error:
            raise NotWelcome(f"the agent at {self._path} does not answer: {error}") from error
        if not isinstance(welcome, Welcome):
            raise NotWelcome(f"the agent at {self._path} did not welcome this worker")
        os.register_at_fork(after_in_child=self._abandon)
        return welcome

    def start(self, reach: Reach) -> None:
        """Hear orders from now on."""
        self._reach = reach
        threading.Thread(target=self._serve, name=CONTROL_THREAD, daemon=True).start()

    def say(self, fact: Event) -> None:
        """Tell a fact; again whenever the agent was away, in the order of telling."""
        with self._lock:
            self._facts.append(Said(fact))
            self._send(fact)

    def answer(self, answer: Answer, *to: type[WorkerOrder]) -> None:
        """Answer an order; again whenever it, or another of these kinds, is repeated."""
        with self._lock:
            self._answers.update(dict.fromkeys(to, Said(answer)))
            self._send(answer)

    # ------------------------------------------------------------ the control thread

    def _serve(self) -> None:
        try:
            self._hear_for_ever()
        except BaseException:  # noqa: BLE001  the top of this thread: without it the worker would be deaf
            print("torchrelay: the control thread of this worker has failed", file=sys.stderr)
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(EXIT_DEFECT)

    def _hear_for_ever(self) -> None:
        assert self._socket is not None, "connected"
        assert self._reach is not None, "then started"
        position, reach = self._position, self._reach
        if not self._identity.known:
            self._niceness.give_way()  # a spare, as long as nothing is said of a rank
        breaks = 0
        while True:
            try:
                data = self._socket.receive(BREAK_S if position.blocked and breaks < BREAKS else BEAT_S)
                if data is not None:
                    self._hear(data)
            except (Closed, WireError) as error:
                self._reconnect(error)
            collectives, elsewhere = reach.collectives(), reach.elsewhere()
            position.beat(collectives, elsewhere)
            reach.look(collectives, elsewhere)
            if not position.blocked:
                breaks = 0
                continue
            # Again and again: between two breaks the main thread may have gone into a further collective.
            if breaks < BREAKS or breaks % BEATS == 0:
                reach.break_connections()
            breaks += 1

    def _hear(self, data: bytes) -> None:
        message = decode_to_worker(data)
        self._position.word()
        if isinstance(message, PassOn) and message.worker == self._worker:
            end_by(message.number)
        if not isinstance(message, WorkerOrder):
            return
        if message.worker != self._worker or message.job != self._job:
            log.warning("dropped an order for %s", message.worker)
            return
        if isinstance(message, Assign) and message.examples:
            self._niceness.give_way()
        elif isinstance(message, Interrupt | Replay | Assign):
            self._niceness.take_turn()
        match message:
            case Interrupt():
                self._interrupt(message)
            case Halt():
                self._report(self._position.halt(message.generation))
            case Assign():
                self._position.hear(message)
                self._identity.assign(message)
                self._repeat_answer(message)
            case Recall():
                self._recall(message)
            case _:
                if self._position.hear(message) and not self._lift(message):
                    self._repeat_answer(message)

    def _interrupt(self, order: Interrupt) -> None:
        assert self._reach is not None, "orders are heard after the start"
        reported = self._report(self._position.interrupt(order.generation))
        if reported and self._position.poisoned:
            self._reach.cancel()
            self._reach.break_connections()

    def _report(self, report: Report | None) -> bool:
        """Say where we stand; False if there is nothing to say."""
        if report is None:
            return False
        with self._lock:
            self._reported = report
            self._send(self._reported_event(report))
        return True

    def _recall(self, order: Recall) -> None:
        """Hand out what we keep of a rank that is lost, whatever the main thread does meanwhile."""
        if not self._position.hear(order):
            return
        assert self._reach is not None, "orders are heard after the start"
        kept = RecordKept(
            job=self._job,
            generation=order.generation,
            worker=self._worker,
            rank=order.rank,
            ward=order.ward,
            point=order.point,
            private=self._reach.kept(order.ward, order.point, order.restarts),
        )
        with self._lock:
            self._send(kept)

    def _lift(self, order: WorkerOrder) -> bool:
        """Whether this order calls off a halt for which the main thread has not stopped: then it just goes on."""
        if not isinstance(order, Resume) or not self._position.lift(order.generation):
            return False
        resumed = WorkerResumed(
            job=self._job, generation=order.generation, worker=self._worker, rank=self._identity.rank
        )
        self.answer(resumed, Resume)
        return True

    def _reported_event(self, report: Report) -> WorkerReported:
        return WorkerReported(
            job=self._job,
            generation=report.generation,
            worker=self._worker,
            rank=self._identity.rank,
            committed=report.committed,
            phase=report.phase,
            pending=report.pending,
            caught_up=report.caught_up,
            kept=self._reach.snapshot_store() if self._reach is not None else (),
        )

    def _repeat_answer(self, order: WorkerOrder) -> None:
        with self._lock:
            said = self._answers.get(type(order))
            if said is None or said.event.generation != order.generation:
                return
            answer = said.event
            others = isinstance(order, Restore) and isinstance(answer, RestoreFailed) and not _named(order, answer)
            if not others:  # with other sources it is another order, for the main thread
                self._send(said.again())

    # ------------------------------------------------------------ the socket

    def _dial(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(self._path))
        except OSError:
            connection.close()
            raise
        return connection

    def _send(self, event: Event) -> None:
        """Send if there is a connection; if not, the next one begins with all that was said."""
        if self._socket is None:
            return
        try:
            self._socket.send(encode(event), SEND_S)
        except (Closed, TimeoutError):
            pass  # the control thread sees it too, and calls again

    def _reconnect(self, why: Exception) -> None:
        """Find the agent again, as long as it takes, and tell it all that holds. Training goes on meanwhile."""
        log.warning("the agent is gone (%s)", why)
        assert self._socket is not None, "there was a connection"
        assert self._reach is not None, "and orders were heard"
        self._socket.close()
        while True:
            try:
                connection = FrameSocket(self._dial())
                data = connection.receive(GREETING_S)
                if data is not None and isinstance(decode_to_worker(data), Welcome):
                    break
                connection.close()
            except (OSError, Closed, WireError):
                pass
            self._position.beat(self._reach.collectives(), self._reach.elsewhere())
            time.sleep(CONNECT_S)
        self._position.word()
        with self._lock:
            self._socket = connection
            for fact in self._facts:
                self._send(fact.again())
            if self._reported is not None:
                self._send(self._reported_event(self._reported))
            for said in dict.fromkeys(self._answers.values()):
                if said.event.generation == self._position.heard:
                    self._send(said.again())

    def _abandon(self) -> None:
        """In a forked child: the connection is the parent's."""
        if self._socket is not None:
            self._socket.abandon()
            self._socket = None


def _named(order: Restore, answer: RestoreFailed) -> bool:
    return answer.source in {source.rank for source in order.sources}


# ---------------------------------------------------------------- where the main thread stands

# It is looked at when nothing has changed for a while.
#
# Nothing of it is done while training gets on: the stack of the main thread is read only when the worker has begun
# nothing and entered nothing since the look before. What is in the page then is where a rank stands for others
# (`protocol/health/stalls`).

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

    def __init__(self, position: Position) -> None:
        self._position = position
        self._seen: tuple[object, ...] = ()
        self._spot: Spot | None = None

    def look(self, collectives: int, elsewhere: Sequence[tuple[int, int]] | None) -> None:
        """Called with every sign of life: says where the main thread stands, if it has not got on since the last."""
        position = self._position
        seen = (position.phase, position.entered_ns, position.committed, collectives, elsewhere)
        if seen != self._seen:
            self._seen, self._spot = seen, None
            return
        spot = self._see()
        if spot != self._spot:
            self._spot = spot
            position.mark_spot(spot)

    def _see(self) -> Spot:
        position = self._position
        if position.phase is WorkerPhase.FINISHED:
            return Spot(line=position.ended_at)
        frames = list(stack())
        call, group, direct = communication(frames)
        return Spot(line=line_in(frames), call=call, group=group, direct=direct, kind=position.kind)


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
