"""Traffic: events on their way into the journal, and which of them are heard together; orders to agents."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol, cast, get_args

from msgspec import Struct

from torchrelay.orchestrator.store.journal import Call
from torchrelay.protocol.messages.events import WORKERS_TELL, Event, JobSpec, age_event
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.messages.orders import AnyOrder, Fence, Interrupt, Interrupts, Order
from torchrelay.protocol.model.state import Cluster
from torchrelay.protocol.rules.answers import is_repeated
from torchrelay.protocol.succession.succession import VoterId
from torchrelay.wire.messages.channel import JobTerms, OrderFrame, ToAgent

# Events that are heard in one go, at most.
TOGETHER = 65_536
# Within one frame: first who must stop, then who starts, then the rest in the order of a recovery.
SEQUENCE: dict[type[Order], int] = {kind: place for place, kind in reversed([*enumerate((Fence, *get_args(AnyOrder)))])}
SEQUENCE[Interrupts] = SEQUENCE[Interrupt]


class Heard(Struct, frozen=True):
    """An event that has come. Its number in the journal is told, or the reason why it has none."""

    event: Event
    came_s: float  # of the loop's time
    told: Callable[[int | Exception], None]
    call: Call | None = None

    def aged(self, now_s: float) -> Event:
        """The event, so much later as it has waited here."""
        return age_event(self.event, round(1000 * (now_s - self.came_s)))


def those_new(cluster: Cluster, together: list[Heard]) -> list[Heard]:
    """Without answers that were heard before: the journal need not have them twice."""
    return [heard for heard in together if not is_repeated(cluster, heard.event)]


def tell(together: list[Heard], fresh: list[Heard], first: int) -> None:
    """Tell each its number in the journal; of one that is not new, that of the event before it: so far all is there."""
    place = 0
    for heard in together:
        place += place < len(fresh) and heard is fresh[place]
        heard.told(first + place - 1)


def settle(written: asyncio.Future[int], told: int | Exception) -> None:
    """Let somebody go on that waits for an event to be in the journal; nobody need."""
    if written.done():
        return
    if isinstance(told, int):
        written.set_result(told)
    else:
        written.set_exception(told)
        written.exception()


class Inbox:
    """Of one orchestrator, in its event loop."""

    def __init__(self) -> None:
        self._events: deque[Heard] = deque()
        self._stirred = asyncio.Event()

    def put(self, heard: Heard) -> None:
        self._events.append(heard)
        self._stirred.set()

    def stir(self) -> None:
        """Let who waits for an event look again, and not wait for the tick."""
        self._stirred.set()

    async def get(self) -> Heard | None:
        """The next event; None if there is another reason to look."""
        if not self._events:
            await self._stirred.wait()
        self._stirred.clear()
        return self.get_nowait()

    def get_nowait(self) -> Heard | None:
        """The next event; None if there is none."""
        return self._events.popleft() if self._events else None

    def batches(self, first: Heard) -> Iterator[list[Heard]]:
        """This event and what else has come by now, in order. What workers tell is heard together; the rest alone."""
        together: list[Heard] = []
        for heard in self._those_there(first):
            if heard.call is None and isinstance(heard.event, WORKERS_TELL):
                together.append(heard)
                continue
            if together:
                yield together
                together = []
            yield [heard]
        if together:
            yield together

    def _those_there(self, first: Heard) -> Iterator[Heard]:
        yield first
        for _ in range(TOGETHER - 1):
            if not self._events:
                return
            yield self._events.popleft()


# ---------------------------------------------------------------- orders


class AgentPort(Protocol):
    """The way to one agent. `send` never waits and never fails; who does not read is disconnected."""

    node: NodeId
    incarnation: str
    voter: VoterId

    def send(self, message: ToAgent) -> None: ...

    def close(self, reason: str) -> None: ...


def send_orders(some: Iterable[Order], connections: Mapping[NodeId, AgentPort], lease: int) -> None:
    """Send them to those agents that are there; the others are told when they come back."""
    by_node: dict[NodeId, list[AnyOrder]] = {}
    for order in some:
        by_node.setdefault(order.node, []).append(cast(AnyOrder, order))
    for node, batch in by_node.items():
        connection = connections.get(node)
        if connection is not None:
            if len(batch) > 1:
                batch.sort(key=lambda order: SEQUENCE[type(order)])
            connection.send(OrderFrame(tuple(batch), lease))


def terms_of(spec: JobSpec, secret: str, patience_s: float) -> JobTerms:
    """What agents must know of a job. Each job has a secret of its own."""
    own = hashlib.blake2b(spec.job.encode(), key=bytes.fromhex(secret), digest_size=32).digest()
    return JobTerms(spec=spec, secret=own, patience_s=patience_s)


# ---------------------------------------------------------------- how late what is said is

# How long what an agent says was under way, or lay unread while the orchestrator did not run.
#
# Both ends have clocks of their own. The least difference that was ever seen between them, when something is read and
# when it was sent, is that of a message that was read at once; what exceeds it is lateness. As clocks drift (some 50
# millionths), and may stand still for a while (a virtual machine that is paused), it is remembered for half a minute to
# a minute: after that long, what was read late has been followed by what was not.

SPAN_MS = 30_000


class Lateness:
    """Of one connection."""

    def __init__(self, source: Callable[[], int] = time.monotonic_ns) -> None:
        self._source = source
        self._since_ms = 0
        self._least_ms: int | None = None  # in this span
        self._before_ms: int | None = None  # in the one before it

    def of(self, sent_ms: int) -> int:
        """How late, in ms, something is read now that was sent at `sent_ms` of the sender's clock (0: unknown)."""
        if not sent_ms:
            return 0
        now_ms = self._source() // 1_000_000
        apart = now_ms - sent_ms
        if self._least_ms is None or now_ms - self._since_ms >= SPAN_MS:
            self._since_ms, self._before_ms, self._least_ms = now_ms, self._least_ms, apart
        self._least_ms = min(self._least_ms, apart)
        least = self._least_ms if self._before_ms is None else min(self._least_ms, self._before_ms)
        return apart - least
