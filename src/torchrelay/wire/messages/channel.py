"""Channel: the WebSocket between an agent and the orchestrator. Every message is one binary frame of msgpack.

The agent connects to `AGENT_PATH` with the header `Authorization: Bearer <token>` and says `Attach`. Then:

    orchestrator -> agent   Attached (or Refused, and the connection ends); JobTerms before a job's first StartWorker,
                            if the job came later; OrderFrame whenever something is to be done; Ack; Pace; Shutdown
    agent -> orchestrator   EventFrame, EventsFrame, BeatFrame, NetworkFrame, OutputFrame

Events are numbered by the agent, from 1, per incarnation. They are kept until acknowledged, and sent again, in order
and with their numbers, after every `Attached`. `Ack(seq)` says that every event up to `seq` is in the journal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, cast

from msgspec import Meta, Struct

from torchrelay.protocol.health.pulses import Beat
from torchrelay.protocol.messages.events import AnyEvent, JobSpec, WorkerSeen
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.messages.orders import AnyOrder, Interrupts, singly
from torchrelay.wire.messages.codec import Codec
from torchrelay.wire.messages.pathnews import NetworkNews

AGENT_PATH = "/agent"
LAUNCH_PATH = "/v1/launch"  # GET: what agents that have no folder in common with the launcher are to run
VERSION = 7  # of this channel; both ends must have the same
Fact = Annotated[str, Meta(max_length=100)]
SHUTDOWN_GRACE_S = 5.0


# ---------------------------------------------------------------- agent -> orchestrator


class Facts(Struct, frozen=True, kw_only=True):
    """What must be the same on all machines, or had better be; empty where it is not known."""

    torch: Fact = ""
    torchrelay: Fact = ""
    python: Fact = ""
    driver: Fact = ""  # of NVIDIA's GPUs
    script: Fact = ""  # digest of the main file

    def differing(self, other: Facts) -> tuple[tuple[str, str, str], ...]:
        """Name, ours and theirs, of what both know and what differs."""
        pairs = ((name, getattr(self, name), getattr(other, name)) for name in self.__struct_fields__)
        return tuple((name, ours, theirs) for name, ours, theirs in pairs if ours and theirs and ours != theirs)


class Attach(Struct, frozen=True, tag=True, kw_only=True):
    """The first message of an agent: who it is, and its workers. Becomes `NodeJoined`.

    `workers` are those that run, and those that have ended while the orchestrator has not acknowledged it: their
    `WorkerExited`, with the private state, follows.
    """

    version: int = VERSION
    node: NodeId
    incarnation: str
    slots: int
    workers: tuple[WorkerSeen, ...] = ()
    facts: Facts | None = None  # of an agent on a machine of its own


class EventFrame(Struct, frozen=True, tag=True):
    """One event with its number. `sent_ms`: when it was sent, on the agent's own clock; 0: it does not say."""

    seq: int
    event: AnyEvent
    sent_ms: int = 0


class EventsFrame(Struct, frozen=True, tag=True):
    """Events that follow one another, with the number of the first: workers of a node often answer together."""

    seq: int
    events: tuple[AnyEvent, ...]
    sent_ms: int = 0

    def each(self) -> Iterator[EventFrame]:
        """As if each had come alone."""
        return (EventFrame(seq, event, self.sent_ms) for seq, event in enumerate(self.events, self.seq))


class BeatFrame(Struct, frozen=True, tag=True):
    """A sign of life; not acknowledged, not journalled. `sent_ms` as in `EventFrame`."""

    beat: Beat
    sent_ms: int = 0


class NetworkFrame(Struct, frozen=True, tag=True):
    """What the node's network paths look like, for people; not acknowledged, not journalled."""

    news: NetworkNews


class Printed(Struct, frozen=True):
    """How far the lines of a node's log have come: to byte `end` of the file with this number (its inode)."""

    log: str
    file: int
    end: int


class OutputFrame(Struct, frozen=True, tag=True):
    """Lines that workers of another machine have printed, for the launcher; not acknowledged, not journalled.

    `upto`: the log in which they stand there, and are to stand here, and where they end in it.
    """

    upto: Printed
    lines: tuple[str, ...]


ToOrchestrator = Attach | EventFrame | EventsFrame | BeatFrame | NetworkFrame | OutputFrame


# ---------------------------------------------------------------- orchestrator -> agent


class JobTerms(Struct, frozen=True, tag=True, kw_only=True):
    """What an agent must know of a job before it starts a worker of it. The secret stays in memory."""

    spec: JobSpec
    secret: bytes
    patience_s: float  # how long its workers wait for orders

    def __repr__(self) -> str:
        return f"JobTerms(job={self.spec.job!r})"  # a secret must not reach a log


class Attached(Struct, frozen=True, tag=True, kw_only=True):
    """Welcome; all jobs so far. `tainted`: slots and keys of the taints that lie on this node for its paths."""

    jobs: tuple[JobTerms, ...] = ()
    beat_ms: int = 500
    lease: int = 0  # the orchestrator's; an agent that knows a higher one does not take it
    journal: str = ""  # the name of its journal; an agent that knows another one's does not take it
    tainted: tuple[tuple[int | None, str], ...] = ()
    printed: tuple[Printed, ...] = ()  # what has come of this node's logs: what follows is to be sent


class Pace(Struct, frozen=True, tag=True):
    """From now on wait so long between two beats: there are more nodes now, or fewer."""

    beat_ms: int


class Refused(Struct, frozen=True, tag=True, kw_only=True):
    """This agent may not attach, and why. It ends."""

    reason: str


class OrderFrame(Struct, frozen=True, tag=True):
    """Orders for this node, in the order in which they should be looked at. `lease`: of who gives them."""

    orders: tuple[AnyOrder | Interrupts, ...]
    lease: int = 0

    def each(self) -> Iterator[AnyOrder]:
        """One by one, each to one worker."""
        return cast(Iterator[AnyOrder], singly(self.orders))


class Ack(Struct, frozen=True, tag=True):
    """Every event up to `seq` is journalled; the agent forgets them."""

    seq: int


class Shutdown(Struct, frozen=True, tag=True, kw_only=True):
    """End all workers (SIGTERM, after `grace_s` SIGKILL), report them, and exit."""

    reason: str
    grace_s: float = SHUTDOWN_GRACE_S


ToAgent = Attached | Refused | JobTerms | OrderFrame | Ack | Pace | Shutdown

_to_orchestrator: Codec[ToOrchestrator] = Codec(ToOrchestrator, "message from an agent")
_to_agent: Codec[ToAgent] = Codec(ToAgent, "message to an agent")


def decode_to_orchestrator(data: bytes | bytearray | memoryview) -> ToOrchestrator:
    """Decode a message that an agent sent. Raises `WireError`."""
    return _to_orchestrator.decode(data)


def decode_to_agent(data: bytes | bytearray | memoryview) -> ToAgent:
    """Decode a message that the orchestrator sent. Raises `WireError`."""
    return _to_agent.decode(data)
