"""Frames between a worker and its agent, over a unix socket.

The worker connects to `TORCHRELAY_AGENT_SOCKET`; the agent knows it by its process id. Then:

    agent  -> worker   Welcome, once per connection; after it, orders (`AnyOrder`), and while the agent is connected to
                       the orchestrator, Attended every `ATTENDED_S` seconds
    worker -> agent    WorkerStarted, once per connection; then again those of WorkerWarm and WorkerJoined that hold;
                       after them, events (`FromWorker`) as they come

A connection can end while both live (an agent that was restarted): the worker connects again, at most `patience_s`
long, and greets as above, from which the new agent learns what its predecessor knew. An attempt can end at any moment,
also between connecting and the Welcome (an agent that is just dying takes the call): then it tries again. The Welcome
may take long, if the agent itself waits for the orchestrator.

A worker's forked children (loader workers) must let go of the connection (`FrameSocket.abandon`): its end tells the
agent that the worker's last word has been heard.
"""

from __future__ import annotations

from msgspec import Struct

from torchrelay.protocol.messages.enclosed import Resumed
from torchrelay.protocol.messages.events import (
    CollectiveFailed,
    OnceRecorded,
    ParkFailed,
    ReconfigureFailed,
    RecordKept,
    ReplicasDiffer,
    RestoreFailed,
    StateRestored,
    WorkerFinished,
    WorkerJoined,
    WorkerParked,
    WorkerPrepared,
    WorkerRaised,
    WorkerReady,
    WorkerReconfigured,
    WorkerReported,
    WorkerResumed,
    WorkerStarted,
    WorkerWarm,
)
from torchrelay.protocol.messages.ids import JobId, NodeId, WorkerId
from torchrelay.protocol.messages.orders import AnyOrder
from torchrelay.wire.messages.codec import Codec

ATTENDED_S = 2.0


class Welcome(Struct, frozen=True, tag=True, kw_only=True):
    """What a worker must know that may not stand in its environment, and where it is."""

    job: JobId
    worker: WorkerId
    node: NodeId
    slot: int
    host: str  # the address this node's workers listen on
    secret: bytes  # the job's: proves to other workers that one belongs to it
    patience_s: float  # how long a worker that needs orders waits for a sign of the orchestrator; then it ends with 92
    logs: str  # folder of the run's log files
    world_size: int = 0
    nproc_per_node: int = 0
    encrypts: bool = False  # what goes from worker to worker: see `Launch`
    park_dir: str = ""  # where the job may be written down: see `JobSpec`
    grace_ms: int = 0  # and how long that may take, if the launcher is told to end
    resumes: Resumed | None = None  # the parking that it goes on from

    def __repr__(self) -> str:
        return f"Welcome(job={self.job!r}, worker={self.worker!r}, node={self.node!r}, slot={self.slot})"  # no secret


class Attended(Struct, frozen=True, tag=True):
    """The orchestrator is there, and has nothing to say: whoever waits for an order may go on waiting."""


ToWorker = Welcome | Attended | AnyOrder

# What a worker may say: only of itself. (OnceRecorded names its rank instead.)
FromWorker = (
    WorkerStarted
    | WorkerWarm
    | WorkerPrepared
    | WorkerJoined
    | WorkerRaised
    | CollectiveFailed
    | ReplicasDiffer
    | OnceRecorded
    | WorkerReported
    | WorkerReady
    | RecordKept
    | WorkerReconfigured
    | ReconfigureFailed
    | StateRestored
    | RestoreFailed
    | WorkerResumed
    | WorkerFinished
    | WorkerParked
    | ParkFailed
)

_from_worker: Codec[FromWorker] = Codec(FromWorker, "event of a worker")
_to_worker: Codec[ToWorker] = Codec(ToWorker, "message to a worker")


def decode_to_worker(data: bytes | bytearray | memoryview) -> ToWorker:
    """Decode a frame that the agent sent. Raises `WireError`."""
    return _to_worker.decode(data)


def decode_from_worker(data: bytes | bytearray | memoryview) -> FromWorker:
    """Decode a frame that a worker sent. Raises `WireError`."""
    return _from_worker.decode(data)
