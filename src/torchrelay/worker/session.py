"""Session: what one worker process is made of. There is one for the life of the process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchrelay.errors import RefusedError, StepInterrupted
from torchrelay.protocol.messages.events import OnceRecorded, Snapshot, WorkerStarted
from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Point, Rank, WorkerId
from torchrelay.wire.files.page import Page
from torchrelay.wire.files.snapshot_store import SnapshotStore, snapshot_store_in
from torchrelay.wire.messages.worker_frames import Welcome
from torchrelay.worker.control.agent_connection import AgentConnection, Lookout, Reach
from torchrelay.worker.control.identity import Identity
from torchrelay.worker.control.position import Position
from torchrelay.worker.peers import parking, snapshot_upload
from torchrelay.worker.peers.buddies import Buddies
from torchrelay.worker.peers.lanes import Lanes
from torchrelay.worker.peers.rounds import Rounds
from torchrelay.worker.peers.snapshots import Snapshots
from torchrelay.worker.process_groups import groups
from torchrelay.worker.source.program import Program
from torchrelay.worker.tensors import values
from torchrelay.worker.transfer.serving import SHELVE
from torchrelay.worker.transfer.stream import Ask, Stream
from torchrelay.worker.transfer.tls import Tls
from torchrelay.worker.transfer.transfer import Cancel, StateServer

MAX_ONCE = 1 << 20  # bytes of a result of once(): it stands in the journal


@dataclass
class Session:
    """This worker, as its parts know one another."""

    worker: WorkerId
    job: JobId
    page: Page
    position: Position
    identity: Identity
    agent: AgentConnection
    welcome: Welcome
    server: StateServer
    store: Any  # the rendezvous store that this worker can host; kept alive here
    transfer: Cancel = field(default_factory=Cancel)  # of the fetch under way, for the control thread
    tls: Tls | None = None  # what goes between workers is encrypted
    done_once: dict[str, bytes] = field(default_factory=dict)
    lanes: Lanes = field(default_factory=Lanes)
    buddies: Buddies = field(default_factory=Buddies)
    rounds: Rounds = field(default_factory=Rounds)
    snapshots: Snapshots | None = None  # once the script has joined
    program: Program = field(default_factory=Program)
    rehearsing: bool = False  # a step is tried out that will not count

    @property
    def rank(self) -> Rank:
        """Our rank; waits until it is known."""
        return self.identity.rank

    @property
    def snapshot_store(self) -> SnapshotStore:
        """The snapshots in the memory of this node; and what the job goes on from, if it was parked."""
        resumes = self.welcome.resumes
        return snapshot_store_in(self.page.path.parent, "" if resumes is None else resumes.folder)

    @property
    def replacement(self) -> bool:
        """Whether we take over a rank of a job that is under way; waits until it is known."""
        return self.identity.wait().replacement

    @property
    def target(self) -> bool:
        """Whether we are the target of a move, and the rank is still another's; waits until it is known."""
        return bool(self.identity.wait().examples)

    def new_transfer(self) -> Cancel:
        """A handle for the next fetch, which an interrupt will cut."""
        self.transfer = Cancel()
        return self.transfer

    def break_connections(self) -> int:
        """Make whoever is blocked in communication fail now. From any thread; returns how many were broken."""
        snapshots = self.snapshots.cut() if self.snapshots is not None else 0
        return groups.break_connections() + self.lanes.cut() + snapshots

    def record_kept(self, ward: Rank, point: Point, restarts: int) -> bytes:
        """A copy of a rank's private record, from the gates or out of a snapshot; empty if there is none."""
        found = self.buddies.kept(ward, point)
        kept = None if found else self.snapshot_store.open(Snapshot(ward, point, restarts))
        if kept is None:
            return found
        kept.close()
        return kept.private

    def serve_snapshot_store(self, stream: Stream, generation: Generation, ask: Ask) -> None:
        """For the state server: take in or hand out a snapshot. Raises `StreamBroken`."""
        if ask.want.startswith(SHELVE):
            snapshot_upload.take(stream, generation, ask, self.snapshot_store, lambda: self.position.heard)
        else:
            snapshot_upload.hand(stream, generation, ask, self.snapshot_store)

    def once_by_call(self, name: str, do: Any, *args: Any, **kwargs: Any) -> Any:
        """`torchrelay.once`."""
        return self.once(name, do, args, kwargs)

    def once(self, name: str, do: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of the first `do(*args, **kwargs)` under this name, by this rank or who held it before."""
        recorded = self.done_once.get(name, dict(self.identity.wait().once).get(name))
        if recorded is not None:
            return values.decode(recorded)
        if self.rehearsing:
            raise StepInterrupted  # what is done once is done for good
        value = do(*args, **kwargs)
        try:
            encoded = values.encode(value, f"the result of once({name!r})")
        except TypeError as error:
            raise RefusedError(str(error), "return a number, a string, or a list or dict of them") from error
        if len(encoded) > MAX_ONCE:
            raise RefusedError(
                f"the result of once({name!r}) has {len(encoded):,} bytes, and at most {MAX_ONCE:,} are kept",
                "return what names it, such as a path",
            )
        self.record_once(name, encoded)
        return value

    def record_once(self, name: str, value: bytes) -> None:
        """Whoever takes over this rank has this result."""
        self.done_once[name] = value
        restarts = self.identity.wait().restarts
        self.agent.say(OnceRecorded(job=self.job, rank=self.rank, name=name, value=value, restarts=restarts))


def open_session(env: Mapping[str, str]) -> Session:
    """Call the agent that started this process, and hear its orders from now on.

    `env`: TORCHRELAY_WORKER and its kin. Raises `NotWelcome`.
    """
    worker, job = WorkerId(env["TORCHRELAY_WORKER"]), JobId(env["TORCHRELAY_JOB"])
    page = Page(Path(env["TORCHRELAY_PAGE"]), create=True)
    position = Position(page)
    logs = env.get("TORCHRELAY_LOGS")
    identity = Identity(Path(logs) if logs else None)
    agent = AgentConnection(Path(env["TORCHRELAY_AGENT_SOCKET"]), worker, job, position, identity)
    welcome = agent.connect()
    store, store_address = groups.host_store(welcome.host)
    tls = Tls() if welcome.encrypts else None
    server = StateServer(welcome.secret, welcome.host, tls=tls)
    identity.wait_on = lambda: position.have_patience(welcome.patience_s)
    session = Session(worker, job, page, position, identity, agent, welcome, server, store, tls=tls, lanes=Lanes(tls))
    started = WorkerStarted(
        worker=worker,
        node=NodeId(env["TORCHRELAY_NODE"]),
        slot=int(env["TORCHRELAY_SLOT"]),
        pid=os.getpid(),
        address=server.address,
        store=store_address,
        **parking.found(welcome),
    )
    agent.say(started)
    reach = Reach(
        session.break_connections,
        groups.collectives,
        groups.begun_elsewhere,
        lambda: session.transfer.cancel(),
        session.record_kept,
        session.snapshot_store.kept,
        Lookout(position).look,
    )
    server.adopt, server.shelve = session.lanes.adopt, session.serve_snapshot_store
    agent.start(reach)
    return session
