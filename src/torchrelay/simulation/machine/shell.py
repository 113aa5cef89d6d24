"""Shell: the simulated orchestrator. The same straight lines as the real one: journal, advance, say what is new.

It crashes at any moment; what is not in its journal it has never heard. After its return the clock is held until the
agents are back, as in the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from random import Random
from typing import Any

from torchrelay.protocol.health.deafness import Deafness, is_deaf, set_back
from torchrelay.protocol.health.failure_detector import judge
from torchrelay.protocol.health.pulses import Beat, FailureDetector, forget, hear
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.rules.answers import is_repeated
from torchrelay.protocol.rules.cluster import EMPTY, Cluster, advance, orders
from torchrelay.protocol.rules.standing import StandingOrders
from torchrelay.simulation.machine.network import Connection
from torchrelay.simulation.ports import Copied, Entry, Watched

# Why the clock is held.
AWAY, DEAF, UNSAID = "agents are to come back", "nobody is heard", "what was decided waits for heirs"
TICK_MS = 250
REPEAT_MS = 1_000
SMALL = 32  # ranks: of more, all orders are not compared after every event
RETURN_MS = 3_000
BUSY_MS = (0, 0, 3, 60)  # how long what workers tell may wait to be heard, see `orchestrator.core.traffic.TOGETHER`

# Within one batch: first who must stop, then who starts, then the rest in the order of a recovery.
SEQUENCE: dict[Any, int] = {
    kind: place
    for place, kind in enumerate(
        (
            od.Fence,
            od.StartWorker,
            od.PassOn,
            od.Assign,
            od.Interrupt,
            od.Halt,
            od.Decide,
            od.Recall,
            od.Replay,
            od.Reconfigure,
            od.Restore,
            od.Resume,
            od.Park,
            od.Leave,
        )
    )
}


class Shell:
    """The orchestrator's process."""

    def __init__(self, world: Watched, copied: Copied | None = None, *, up: bool = True) -> None:
        self.world = world
        self.copied = copied  # None: it is alone, and nothing waits to leave
        self.up = up
        self.frozen = False  # its process is stopped
        self.superseded = False  # another one acts, with a higher lease: what this one does is of no account
        self.journal: list[Entry] = []
        self.cluster: Cluster = EMPTY
        self.failure_detector = FailureDetector()
        self.standing = StandingOrders()
        self.links: dict[NodeId, Connection] = {}
        self.starts = 0
        self._behind_ms = 0  # time that was left out
        self._told_ms = 0  # of it, what the ledger knows
        self._held_ms: int | None = None  # since when the clock is held
        self._holds: set[str] = set()  # why it is
        self._deafness = Deafness()
        self._away_ms = 0  # when it began to wait for the agents to come back
        self._repeated_ms = 0
        self._inbox: list[tuple[ev.Event, int, Callable[[int], None]]] = []  # with the time of arrival
        self._busy = Random(world.plan.seed ^ 0x10AD)  # apart, so that chance elsewhere stays what it was
        self._busy_ms = self._busy.choice(BUSY_MS)
        self._looked, self._look_every = 0, 1 + world.plan.spec.world_size // SMALL
        self._tick(0)

    @property
    def now_ms(self) -> int:
        """Its own clock: the world's, without what was left out."""
        now = self.world.now if self._held_ms is None else self._held_ms
        return now - self._behind_ms

    # ------------------------------------------------------------ hearing

    def hear(self, event: ev.Event) -> None:
        """Journal, advance, say what is new."""
        if not isinstance(event, ev.TimeLeftOut):
            self._own_up()
        self._hear_all([event])

    def _hear_all(self, events: Sequence[ev.Event]) -> None:
        now = self.now_ms
        entries = [(event, now, number < len(events)) for number, event in enumerate(events, 1)]
        self.journal += entries
        if self.copied is not None:
            self.copied.write(entries)
        for event, _, more in entries:
            before, self.cluster = self.cluster, advance(self.cluster, event, now, more=more)
            self.failure_detector = forget(self.failure_detector, before, self.cluster)
            if self.superseded:
                self.world.seen("late: a former head decides")
            else:
                self.world.heard(event, before, self.cluster)
        fresh = list(od.singly(self.standing.follow(self.cluster)))
        self._looked += 1
        if self._looked % self._look_every == 0:  # a look at all ranks
            self.world.checker.stands(frozenset(self.standing), orders(self.cluster))
        if fresh:
            self._leave(self._ordered, fresh)
        self._send(fresh)

    def _ordered(self, fresh: list[od.Order]) -> None:
        """Orders leave. If heirs were waited for, some may not stand any more."""
        if not self.superseded:
            standing = frozenset(self.standing)
            self.world.checker.ordered([order for order in fresh if order in standing])

    def hear_operator(self, event: ev.Event, answered: Callable[[int], None]) -> None:
        """An operator, or a detector, says something, and is answered when that can be lost no more."""
        self.hear(event)
        self._leave(answered, len(self.journal))

    # ------------------------------------------------------------ leaving

    @property
    def waits(self) -> bool:
        """Whether something waits to leave."""
        return self.copied is not None and self.copied.waits

    def _leave(self, action: Callable[..., None], *given: Any) -> None:
        """Something leaves, when the heirs have all that it depends on."""
        if self.copied is None:
            action(*given)
        else:
            self.copied.leave(partial(action, *given))

    def _own_up(self) -> None:
        """Let the ledger know how long nobody listened, before what was said meanwhile is heard."""
        untold = self.world.now - self.now_ms - self._told_ms
        if untold and self.cluster.jobs:
            self.hear(ev.TimeLeftOut(ms=untold))
            self._told_ms += untold

    def hear_agent(self, connection: Connection, event: ev.Event, written: Callable[[int], None]) -> None:
        """An agent's event arrives. `written` is called when it is in the journal, with how much stands there.

        What workers tell is heard together, as much of it as comes while the orchestrator is busy.
        """
        if not self.up or self.links.get(connection.agent.node) is not connection:
            return
        self._inbox.append((event, self.world.now, written))
        together = isinstance(event, ev.WORKERS_TELL)
        wait_ms = self._busy.randint(0, self._busy_ms) if together else 0
        if not wait_ms:
            self._take(self.starts)
        elif len(self._inbox) == 1:
            self.world.after(wait_ms, self._take, self.starts)

    def _take(self, start: int) -> None:
        """Hear what has come by now."""
        if start != self.starts or not self.up or not self._inbox:
            return
        if self.frozen:
            self.world.after(TICK_MS, self._take, start)
            return
        taken, self._inbox = self._inbox, []
        waited = [(ev.age_event(event, self.world.now - at_ms), written) for event, at_ms, written in taken]
        told = [event for event, _ in waited if isinstance(event, ev.WORKERS_TELL)]
        told = [event for event in told if not is_repeated(self.cluster, event)]
        self._own_up()
        if told:
            self._hear_all(told)
        for event, _ in waited:
            if not isinstance(event, ev.WORKERS_TELL):  # it came last
                self.hear(event)
        for _, written in waited:
            self._leave(written, len(self.journal))

    def hear_beat(self, connection: Connection, beat: Beat) -> None:
        if not self.up:
            return
        node = self.cluster.nodes.get(beat.node)
        if node is not None and node.incarnation == beat.incarnation and not node.alive:
            connection.agent.disconnect()  # it was given up: it must join anew
            return
        self._hear_beat(beat)

    def _hear_beat(self, beat: Beat) -> None:
        if self._deafness.still:
            self._look(deaf=False)
        self.failure_detector = hear(self.failure_detector, beat, self.now_ms)

    # ------------------------------------------------------------ time

    def _tick(self, start: int) -> None:
        if start != self.starts or not self.up:
            return
        if self.frozen:
            self.world.after(TICK_MS, self._tick, start)
            return
        self._mind_what_waits()
        self._release()
        self._mind_silence()
        now = self.now_ms
        found = judge(self.failure_detector, self.cluster, now)
        if found:
            self._own_up()
            self._hear_all(found)
        if advance(self.cluster, ev.Tick(), now) != self.cluster:
            self.hear(ev.Tick())
        if self.world.now - self._repeated_ms >= REPEAT_MS:
            self._repeated_ms = self.world.now
            self._send(self.standing.due())
        if self.copied is not None:
            self.copied.mind(self.cluster)
        self.world.after(TICK_MS, self._tick, start)

    def _release(self) -> None:
        """Let the clock go on when all agents are back, or had their time."""
        if AWAY not in self._holds or self._deafness.still:
            return
        known = {*self.links, None if self.copied is None else self.copied.former}
        missing = [name for name, node in self.cluster.nodes.items() if node.alive and name not in known]
        if not missing or self.world.now - self._away_ms >= RETURN_MS:
            self._go_on(AWAY)
            self._listen_anew()

    def _mind_what_waits(self) -> None:
        """While nothing may leave, nobody can be late. Who was silent stays so."""
        if self.copied is not None and self.copied.late:
            self._hold(UNSAID)
        else:
            self._go_on(UNSAID)

    def wake_up(self, since_ms: int) -> None:
        """Its process was stopped since then: that time is left out, as the real clock does."""
        self.frozen = False
        if self._held_ms is None:
            self._held_ms = since_ms
        self._holds.add(AWAY)
        self._away_ms = self.world.now

    def _hold(self, why: str) -> None:
        if self._held_ms is None:
            self._held_ms = self.world.now
        self._holds.add(why)

    def _go_on(self, why: str) -> None:
        """The clock goes on, if nothing else holds it."""
        self._holds.discard(why)
        if self._held_ms is not None and not self._holds:
            self._behind_ms += self.world.now - self._held_ms
            self._held_ms = None

    def _mind_silence(self) -> None:
        """Hold the clock while nobody is heard; while it is held for another reason nobody is silent."""
        self._look(is_deaf(self.failure_detector, self.cluster, self.now_ms))

    def _look(self, deaf: bool) -> None:
        before, now = self._deafness, self.world.now
        self._deafness = before.look(deaf, now)
        if self._deafness.still and not before.still:
            self._hold(DEAF)
        elif before.since_ms is not None and not self._deafness.still:
            self._go_on(DEAF)
            self.failure_detector = set_back(self.failure_detector, before.stood_ms(now))

    def _listen_anew(self) -> None:
        for node in self.cluster.nodes.values():
            if node.alive:
                beat = Beat(node=node.node, incarnation=node.incarnation)
                self.failure_detector = hear(self.failure_detector, beat, self.now_ms)

    # ------------------------------------------------------------ agents

    def attach(self, connection: Connection, joined: ev.NodeJoined) -> None:
        former = self.links.get(joined.node)
        if former is not None:
            former.close()
        self.links[joined.node] = connection
        self._hear_beat(Beat(node=joined.node, incarnation=joined.incarnation))
        self.hear(joined)
        self._send(self.standing.of_node(joined.node))

    def detach(self, connection: Connection) -> None:
        node = connection.agent.node
        if self.links.get(node) is connection:
            del self.links[node]

    def _send(self, some: Iterable[od.Order]) -> None:
        batches: dict[NodeId, list[od.Order]] = {}
        for order in sorted(some, key=place_of):
            batches.setdefault(order.node, []).append(order)
        for node, batch in sorted(batches.items()):
            link = self.links.get(node)
            if link is None:
                continue
            if self.world.stormy and self.world.plan.weather.reordered:
                self.world.chance.shuffle(batch)
                for order in batch:
                    self._leave(link.down, link.agent.obey, (order,), len(self.journal))
            else:
                self._leave(link.down, link.agent.obey, tuple(batch), len(self.journal))

    # ------------------------------------------------------------ crash and return

    def crash(self) -> None:
        """The process dies. All connections break; agents try to come back."""
        self.up = False
        self._inbox.clear()
        for connection in list(self.links.values()):
            connection.agent.disconnect()

    def restart(self) -> None:
        """Replay the journal, hold the clock, and wait for the agents."""
        if self.up:
            return
        cluster = replay(self.journal)
        self.world.checker.replayed(self.cluster, cluster)
        self._begin(cluster)

    def succeed(self, journal: Sequence[Entry]) -> None:
        """Go on with a copy of another's journal."""
        self.journal = list(journal)
        self._begin(replay(self.journal))

    def _begin(self, cluster: Cluster) -> None:
        self.cluster, self.failure_detector, self.standing = cluster, FailureDetector(), StandingOrders()
        self.standing.follow(cluster)
        last_ms = self.journal[-1][1] if self.journal else 0
        self._behind_ms = self.world.now - last_ms
        self._told_ms = sum(event.ms for event, _, _ in self.journal if isinstance(event, ev.TimeLeftOut))
        self._held_ms = self._away_ms = self.world.now
        self._holds, self._deafness = {AWAY}, Deafness()
        self.up = True
        self.starts += 1
        self._listen_anew()
        self._tick(self.starts)


def replay(journal: Iterable[Entry]) -> Cluster:
    """What a journal says."""
    cluster = EMPTY
    for event, at_ms, more in journal:
        cluster = advance(cluster, event, at_ms, more=more)
    return cluster


def place_of(order: od.Order) -> tuple[int, str, str]:
    """A total order over orders: at most one of each kind stands for one worker."""
    return SEQUENCE[type(order)], order.node, getattr(order, "worker", "")
