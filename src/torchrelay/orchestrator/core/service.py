"""Service: the shell around the protocol core. Event in, journal, advance, orders out.

    inbox -> journal.append -> advance -> new orders at once; all standing orders again every second
    beats -> the failure detector -> judge -> facts, which are events like any other

The journal comes first: an event that could not be written has no effect and is not acknowledged. While the journal
cannot be written (a full disk) the orchestrator is *degraded*: to the agents it is as if it were away. Their
connections are closed and new ones refused, training goes on, agents keep what they have to tell, operators may look
but not change anything, and the clock stands still. Every second it tries the journal again, and when that works the
agents come back and tell everything, exactly as after a restart. Nothing is ever decided that a replay would not find.

One whose lease is over (see `journal`) says nothing more and ends: somebody else decides now.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from torchrelay.orchestrator.core.clock import UNHEARD, Clock, wall_clock_ms
from torchrelay.orchestrator.core.compaction import Compaction
from torchrelay.orchestrator.core.heirs import Heirs, at_once
from torchrelay.orchestrator.core.rules import all_ended, refusal
from torchrelay.orchestrator.core.traffic import AgentPort, Heard, Inbox, send_orders, settle, tell, terms_of, those_new
from torchrelay.orchestrator.core.watch import Watch, is_rival, listen_anew, mind_what_waits, note_beat, note_end
from torchrelay.orchestrator.store.journal import (
    Call,
    Journal,
    JournalRefused,
    JournalUnavailable,
    Reached,
    Superseded,
    Unwritable,
)
from torchrelay.orchestrator.views.scene import Scene, Ways, note_ways
from torchrelay.orchestrator.views.story import Moments
from torchrelay.protocol.health.pulses import Beat, FailureDetector, forget, hear
from torchrelay.protocol.messages.events import Event, JobSpec, NodeJoined, Tick, TimeLeftOut
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.messages.orders import Order
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.model.state import Cluster
from torchrelay.protocol.rules.cluster import EMPTY, RULES_VERSION, advance
from torchrelay.protocol.rules.standing import StandingOrders
from torchrelay.wire.messages.channel import SHUTDOWN_GRACE_S, JobTerms, Shutdown
from torchrelay.wire.messages.pathnews import NetworkNews

log = logging.getLogger("torchrelay.orchestrator")

RESTLESS_S = 0.1  # between ticks while something is under way
CALM_S = 0.5
LONG_S = 0.02  # of work at a time: meanwhile sockets fill
READING_TURNS = 4  # of the event loop, until what lies in the sockets has come to whom it is for
# Between attempts to write a journal that fails, and repetitions of orders (later ones with a beat, if that is longer).
REPEAT_S = 1.0
RETURN_S = 5.0  # how long the clock is held after a start, for the agents to come back
SHUTDOWN_S = 15.0  # how long agents may take to end their workers
KEEP_TIME_MS = 10_000  # between two notes of how late it is, in hours without an event
REMEMBER_S = 2.0  # between two notes of how far the jobs are


class Orchestrator:
    """One orchestrator. Make it in a running event loop; `serve` runs until `end`.

    Raises `JournalRefused` if the journal is damaged, `JournalUnavailable` if it cannot be written.
    """

    def __init__(
        self, journal: Journal, *, patience_s: float = 600.0, source: Callable[[], int] = time.monotonic_ns,
        kept: bool = False, heirs: Heirs | None = None,
    ) -> None:  # fmt: skip
        self.journal = journal
        self.heirs = heirs  # None: nobody takes its place
        self.when_safe = at_once if heirs is None else heirs.when_safe
        self.kept = kept  # somebody starts it again when it ends
        self.patience_s = patience_s
        self.cluster: Cluster = EMPTY
        self.failure_detector = FailureDetector()
        self.reached: Reached = journal.reached()
        self.connections: dict[NodeId, AgentPort] = {}
        self.standing = StandingOrders()
        self.moments = Moments()
        self.ways: Ways = {}
        self.networks: dict[NodeId, tuple[int, NetworkNews]] = {}  # what agents told last of their paths, and when
        self.news = asyncio.Event()  # set, and replaced, whenever there are new moments
        self.degraded = ""
        self.superseded = ""  # who has taken over, in words
        self._inbox, self._ended = Inbox(), asyncio.Event()
        self._secret = journal.secret()
        self._repeated_s = self._held_since_s = 0.0
        self._watch = Watch()
        self._remembered, self._remembered_s = dict(self.reached), 0.0
        self._leave_at_s: float | None = None
        since = journal.last_wall_ms  # a clock on the wall that was set back meanwhile says nothing
        self.clock = Clock(journal.last_ms, source, away_ms=max(0, wall_clock_ms() - since) if since else 0)
        self._told_left_out_ms = 0
        self._skips = self.clock.skips
        self._kept_ms = journal.last_ms
        self._compaction = Compaction(journal)
        self._replay()
        self._own_up()  # before the anchor: who ends in between has told nothing, and the next one tells it all
        journal.anchor(self.clock.now_ms(), wall_clock_ms())
        self._await_agents()

    def _replay(self) -> None:
        start = self._compaction.start()
        if start is not None:
            self.cluster, self.ways = start.cluster, start.known_ways()
        for entry in self.journal.entries(self._compaction.seq):
            before = self.cluster
            self.cluster = advance(before, entry.event, entry.at_ms, more=entry.more)
            self._tell(entry.seq, entry.at_ms, entry.event, before)
            note_ways(self.ways, before, self.cluster)
        self._check_rules()
        self.standing.follow(self.cluster)
        log.info("replayed the events %d to %d of %s", self._compaction.seq, self.journal.last_seq, self.journal.path)

    def _check_rules(self) -> None:
        if self.journal.rules != RULES_VERSION:
            if not all_ended(self.cluster):
                raise JournalRefused(refusal(self.journal.path, self.journal.rules, "of another version"))
            self.journal.adopt_rules()

    # ------------------------------------------------------------ the loop

    async def serve(self) -> None:
        """Hear events and let time pass, until `end`. An assertion that fails ends the process: our own defect."""
        loop = asyncio.get_running_loop()
        next_tick = loop.time()
        while not self._ended.is_set():
            try:
                async with asyncio.timeout_at(next_tick):
                    heard = await self._inbox.get()
            except TimeoutError:
                heard = None
            if self.clock.is_held(UNHEARD) and not (self.degraded or self._watch.still) and self._agents_are_back():
                self.clock.release()
                self._listen_anew()
            mind_what_waits(self.heirs, self.clock)
            if self.degraded:
                self._refuse(*([heard] if heard is not None else []))
                self._try_journal()
            elif heard is not None:
                begun_s = loop.time()
                self._take_all(heard)
                # What was said goes out before more is heard. After long work all that has arrived is heard in one go:
                # no deadline may pass for one whose answer lies unread.
                for _ in range(READING_TURNS if loop.time() - begun_s >= LONG_S else 1):
                    await asyncio.sleep(0)
            if loop.time() >= next_tick:
                await self._take_what_is_there()
                self._pass_time()
                next_tick = loop.time() + self._pause()
            if self._leave_at_s is not None and (not self.connections or loop.time() >= self._leave_at_s):
                self.end()

    async def _take_what_is_there(self) -> None:
        """Hear what has arrived by now. While we were busy it lay unread, and nobody is judged by that."""
        for _ in range(READING_TURNS):
            await asyncio.sleep(0)
        heard = self._inbox.get_nowait()
        if heard is not None:
            self._take_all(heard)

    def _take_all(self, first: Heard) -> None:
        for together in self._inbox.batches(first):
            self._take(together)

    def _pause(self) -> float:
        return REPEAT_S if self.degraded else RESTLESS_S if self.busy else CALM_S

    def put(self, event: Event, call: Call | None = None) -> asyncio.Future[int]:
        """Let the orchestrator hear an event, and who asked for it. The future is its number in the journal."""
        written = asyncio.get_running_loop().create_future()
        self.take(event, partial(settle, written), call)
        return written

    def take(self, event: Event, told: Callable[[int | Exception], None], call: Call | None = None) -> None:
        """The same for one that need not wait: its number is told, or why it has none. That must not fail."""
        self._inbox.put(Heard(event, asyncio.get_running_loop().time(), told, call))

    def _take(self, together: list[Heard]) -> None:
        """Hear what has come together. If the journal does not take all of it, each is heard alone."""
        if self.degraded or self.superseded:
            self._refuse(*together)
        elif len(fresh := those_new(self.cluster, together)) == len(together) == 1:
            self._take_one(together[0])
        else:
            try:
                now_s = asyncio.get_running_loop().time()
                first = self.hear_all([heard.aged(now_s) for heard in fresh]) if fresh else self.journal.last_seq + 1
            except (Unwritable, JournalUnavailable, Superseded):
                for heard in together:
                    self._take([heard])
                return
            self.when_safe(partial(tell, together, fresh, first))

    def _take_one(self, heard: Heard) -> None:
        try:
            seq = self.hear(heard.aged(asyncio.get_running_loop().time()), heard.call)
        except Unwritable as error:
            log.warning("an event is dropped: %s", error)
            heard.told(error)
        except JournalUnavailable as error:
            self._degrade(str(error))
            self._refuse(heard)
        except Superseded as error:
            self.give_way(str(error))
            self._refuse(heard)
        else:
            self.when_safe(partial(heard.told, seq))

    def _refuse(self, *some: Heard) -> None:
        for heard in some:
            heard.told(JournalUnavailable(self.degraded or self.superseded))

    def hear(self, event: Event, call: Call | None = None) -> int:
        """Journal, advance, say what is new.

        Raises `Unwritable`, `JournalUnavailable` or `Superseded`; then nothing has happened.
        """
        if not isinstance(event, TimeLeftOut):
            self._own_up()
        now = self.clock.now_ms()
        seq = self.journal.append(event, now, call)
        self._hear(seq, now, event)
        self._say()
        self._wake_readers()
        return seq

    def hear_all(self, events: Sequence[Event]) -> int:
        """The same for events that have come together. Returns the number of the first; raises as `hear` does."""
        self._own_up()
        now = self.clock.now_ms()
        first = self.journal.append_all(events, now)
        last = first + len(events) - 1
        for seq, event in enumerate(events, first):
            self._hear(seq, now, event, more=seq < last)
        self._say()
        self._wake_readers()
        return first

    def _hear(self, seq: int, now: int, event: Event, *, more: bool = False) -> None:
        """What follows from an event that is in the journal."""
        before, self.cluster = self.cluster, advance(self.cluster, event, now, more=more)
        self._tell(seq, now, event, before)
        note_ways(self.ways, before, self.cluster)
        if before.workers is not self.cluster.workers:
            self.failure_detector = forget(self.failure_detector, before, self.cluster)
        note_end(self.reached, event, before, self.cluster)
        self._introduce(before)

    def _tell(self, seq: int, at_ms: int, event: Event, before: Cluster) -> None:
        for note in self.moments.note(seq, at_ms, self.journal.wall_ms(at_ms), event, before, self.cluster):
            log.info("%d %s %s %s", seq, note.kind, note.incident, note.text)

    def _wake_readers(self) -> None:
        """Whoever waits for news looks again; the next wait is for the next news."""
        news, self.news = self.news, asyncio.Event()
        news.set()

    def _own_up(self) -> None:
        """Let the ledger know how long nobody listened, before what was said meanwhile is heard."""
        self._anchor(self.clock.now_ms())
        untold = self.clock.left_out_ms() - self._told_left_out_ms
        if untold * 1_000_000 >= self.clock.worth_ns():
            if self.cluster.jobs:
                self.hear(TimeLeftOut(ms=untold))
                # The next start counts from here. A hold alone would leave no anchor.
                self.journal.anchor(self.clock.now_ms(), wall_clock_ms())
            self._told_left_out_ms += untold

    # ------------------------------------------------------------ time

    def _pass_time(self) -> None:
        """What follows from time alone: who is silent, what is due; and what must be said again."""
        if self.degraded:
            return
        try:
            self.journal.check_lease()
            self.failure_detector = self._watch.mind_silence(self.failure_detector, self.cluster, self.clock)
            now = self.clock.now_ms()
            if not self.clock.held:  # in the end it is one gap
                self._own_up()
            if now - self._kept_ms >= KEEP_TIME_MS:
                self._keep_time(now)
            detector = self._watch.set_pace(self.failure_detector, self.cluster, self.connections.values())
            self.failure_detector, found = self._watch.judge(detector, self.cluster, now)
            if found:  # nodes that fall silent together, as a rack does, are lost together
                self.hear_all(found)
            # A tick that changes nothing is not worth a line in the journal.
            if advance(self.cluster, Tick(), now) != self.cluster:
                self.hear(Tick())
            self._remember()
            if self.heirs is not None and self._leave_at_s is None:
                self.heirs.mind(self.cluster, self.connections)
            self._compaction.take(self.cluster, self.ways, busy=self.busy)
        except JournalUnavailable as error:
            self._degrade(str(error))
        except Superseded as error:
            self.give_way(str(error))
        self._repeat()
        self.clock.look(self._pause())

    def _remember(self) -> None:
        """Keep how far the jobs are, now and then: it is for reading only."""
        now_s = asyncio.get_running_loop().time()
        if self.reached != self._remembered and now_s - self._remembered_s >= REMEMBER_S:
            self.journal.remember(self.reached)
            self._remembered, self._remembered_s = dict(self.reached), now_s

    @property
    def busy(self) -> bool:
        """Whether a job does anything but train."""
        return any(job.phase not in (JobPhase.RUNNING, JobPhase.ENDED) for job in self.cluster.jobs.values())

    def _anchor(self, now: int) -> None:
        """Note the wall-clock time, at the start and whenever the clock has left something out."""
        if self.clock.skips != self._skips:
            self.journal.anchor(now, wall_clock_ms())
            self._skips = self.clock.skips

    def _keep_time(self, now: int) -> None:
        """Note how late it is, if anything depends on it: times to live, probations, budgets of an hour."""
        self._kept_ms = now
        if self.cluster.jobs or any(taint.until_ms is not None for taint in self.cluster.taints.values()):
            self.journal.keep_time(now, wall_clock_ms())

    def _await_agents(self) -> None:
        """After a start in the middle of things: no deadline may pass before the agents had time to come back."""
        self._held_since_s = asyncio.get_running_loop().time()
        self._watch.hold(self.clock)
        self._listen_anew()

    def _agents_are_back(self) -> bool:
        """Whether every node that should be there is, or has had its time to come back."""
        former = None if self.heirs is None else self.heirs.former
        known = self.connections.keys() | {former}
        missing = [name for name, node in self.cluster.nodes.items() if node.alive and name not in known]
        late = asyncio.get_running_loop().time() - self._held_since_s >= RETURN_S
        if missing and late:
            log.warning("%s did not come back within %g s: time goes on", ", ".join(sorted(missing)), RETURN_S)
        return late or not missing

    def _listen_anew(self) -> None:
        self.failure_detector = listen_anew(self.failure_detector, self.cluster, self.clock.now_ms())

    # ------------------------------------------------------------ a journal that cannot be written

    def _degrade(self, reason: str) -> None:
        log.error("degraded: %s", reason)
        self.degraded = f"{reason}. Nothing is decided until the journal can be written again; training goes on"
        self._watch.hold(self.clock)
        self._disconnect("the journal cannot be written")
        self._wake_readers()

    def _try_journal(self) -> None:
        try:
            self._own_up()
            self.journal.anchor(self.clock.now_ms(), wall_clock_ms())
        except JournalUnavailable:
            return
        except Superseded as error:
            self.give_way(str(error))
            return
        log.warning("the journal can be written again")
        self.degraded = ""
        self._await_agents()
        self._wake_readers()

    def give_way(self, reason: str) -> None:
        """Another orchestrator decides now: say nothing more, and end."""
        log.error("superseded: %s", reason)
        self.superseded = reason
        self.standing.clear()
        self._disconnect("another orchestrator has taken over")
        self._ended.set()
        self._inbox.stir()
        self._wake_readers()

    # ------------------------------------------------------------ agents

    def occupied(self, node: NodeId, incarnation: str) -> bool:
        """Whether another agent of this node is connected and has just been heard."""
        former = self.connections.get(node)
        return former is not None and is_rival(former, incarnation, self.failure_detector, self.clock.now_ms())

    def attach(self, connection: AgentPort, event: NodeJoined) -> asyncio.Future[int]:
        """An agent is there: from now on it is told what to do. Returns as `put` does."""
        former = self.connections.get(connection.node)
        if former is not None:
            former.close("a newer connection of the same node takes its place")
        self.connections[connection.node] = connection
        self._hear_beat(Beat(node=connection.node, incarnation=connection.incarnation))
        if self.heirs is not None:
            self.heirs.introduce(connection)
        return self.put(event)

    def detach(self, connection: AgentPort) -> None:
        """An agent's connection is gone. That proves nothing about its node: silence is judged by the beats."""
        if self.connections.get(connection.node) is connection:
            del self.connections[connection.node]

    def beat(self, connection: AgentPort, beat: Beat) -> None:
        """A sign of life. An agent whose node was given up meanwhile must join anew."""
        node = self.cluster.nodes.get(beat.node)
        if node is not None and node.incarnation == beat.incarnation and not node.alive:
            connection.close("the node was given up: join anew")
            return
        self._hear_beat(beat)
        note_beat(self.reached, beat, self.cluster)

    def _hear_beat(self, beat: Beat) -> None:
        self.failure_detector = self._watch.wake(self.failure_detector, self.clock)
        self.failure_detector = hear(self.failure_detector, beat, self.clock.now_ms())

    def show_network(self, connection: AgentPort, news: NetworkNews) -> None:
        """What a node's network paths look like, for whoever asks; not journalled, as nothing follows from it."""
        self.networks[connection.node] = (self.clock.now_ms(), news)

    def _disconnect(self, reason: str) -> None:
        for connection in list(self.connections.values()):
            connection.close(reason)
        self.connections.clear()

    # ------------------------------------------------------------ saying

    def terms(self, spec: JobSpec) -> JobTerms:
        """What agents must know of a job. Each job has a secret of its own."""
        return terms_of(spec, self._secret, self.patience_s)

    def _introduce(self, before: Cluster) -> None:
        """Tell the agents of new jobs."""
        for name, job in self.cluster.jobs.items():
            if name not in before.jobs:
                for connection in self.connections.values():
                    self.when_safe(partial(connection.send, self.terms(job.spec)))

    def _say(self) -> None:
        """Send what was not said before, at once."""
        self._send(self.standing.follow(self.cluster))

    def _repeat(self) -> None:
        """Say everything again that still holds: messages may be lost, and agents come back."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._repeated_s >= REPEAT_S:
            self._repeated_s = now_s
            self._send(self.standing.due(math.ceil(self.failure_detector.beat_ms / 1000 / REPEAT_S)))

    def remind(self, connection: AgentPort) -> None:
        """Say to one agent what holds now."""
        self._send(self.standing.of_node(connection.node))

    def _send(self, some: Iterable[Order]) -> None:
        self.when_safe(partial(send_orders, tuple(some), self.connections, self.journal.lease))

    # ------------------------------------------------------------ looking and ending

    def scene(self) -> Scene:
        """What there is to see now."""
        anchors, now_ms, lease = tuple(self.journal.anchors), self.clock.now_ms(), self.journal.lease
        return Scene(self.cluster, self.failure_detector, self.reached, anchors, now_ms, self.ways, lease)

    def begin_shutdown(self, reason: str, grace_s: float = SHUTDOWN_GRACE_S) -> None:
        """Let the agents end their workers and go; then end. Returns at once."""
        if self.superseded:
            return
        log.info("shutting down: %s", reason)
        for connection in self.connections.values():
            connection.send(Shutdown(reason=reason, grace_s=grace_s))
        if self._leave_at_s is None:
            self._leave_at_s = asyncio.get_running_loop().time() + SHUTDOWN_S

    @property
    def over(self) -> bool:
        """Whether the service has ended."""
        return self._ended.is_set()

    @property
    def leaving(self) -> bool:  # with its agents: the run is over
        return self._leave_at_s is not None

    def end(self) -> None:
        """Stop serving. Training goes on if the agents were not told to shut down."""
        if self.heirs is not None:
            self.heirs.end()
        self._disconnect("the orchestrator ends")
        try:
            self.journal.remember(self.reached)
            self._keep_time(self.clock.now_ms())
        except (JournalUnavailable, Superseded) as error:
            log.warning("how far the jobs are could not be noted: %s", error)
        self._ended.set()
        self._inbox.stir()
        self._wake_readers()
