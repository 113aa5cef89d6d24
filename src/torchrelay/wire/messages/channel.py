"""Channel: the WebSocket between an agent and the orchestrator. Every message is one binary frame of msgpack.

The agent connects to `AGENT_PATH` with the header `Authorization: Bearer <token>` and says `Attach`. Then:

    orchestrator -> agent   Attached (or Refused, and the connection ends); JobTerms before a job's first StartWorker,
                            if the job came later; OrderFrame whenever something is to be done; Ack; Pace; Shutdown
    agent -> orchestrator   EventFrame, EventsFrame, BeatFrame, NetworkFrame, OutputFrame

Where the head node may be lost (see `protocol.succession`), the agent is a voter, too. It may come to an heir's door
instead of the head's; there nothing but Ask and Note follows its `Attach`, until the heir is head, or it gives up:

    orchestrator -> agent   Note, Ask, Appoint
    agent -> orchestrator   Vote, the answer to Note and Ask


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
from torchrelay.protocol.succession.succession import CopyId, Succession, VoterId
from torchrelay.protocol.succession.voter import Ballot
from torchrelay.wire.messages.codec import Codec
from torchrelay.wire.messages.pathnews import NetworkNews

AGENT_PATH = "/agent"
LAUNCH_PATH = "/v1/launch"  # GET: what agents that have no folder in common with the launcher are to run
VERSION = 8  # of this channel; both ends must have the same
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
    voter: VoterId = VoterId("")  # under which it notes and promises; empty: it does not


class Vote(Struct, frozen=True, tag=True, kw_only=True):
    """What a voter has noted and promised by now, and whether that is what it was asked for last. It is on its disk."""

    voter: VoterId
    granted: bool
    ballot: Ballot


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


ToOrchestrator = Attach | EventFrame | EventsFrame | BeatFrame | NetworkFrame | OutputFrame | Vote


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


class Note(Struct, frozen=True, tag=True):
    """Note this succession: a head proposes it, or says that it is settled. The answer is `Vote`."""

    succession: Succession


class Ask(Struct, frozen=True, tag=True):
    """A candidate asks for a promise of this lease. The answer is `Vote`."""

    lease: int
    copy: CopyId


class Known(Struct, frozen=True, tag=True):
    """Who waits where nobody acts may look for the head where this succession tells, too. It is not to be noted."""

    succession: Succession


class Appoint(Struct, frozen=True, tag=True, kw_only=True):
    """Keep a copy of the journal on this node, under this name. `key`: by which whoever comes for it is known."""

    copy: CopyId
    key: str

    def __repr__(self) -> str:
        return f"Appoint(copy={self.copy!r})"  # a key must not reach a log


ToAgent = Attached | Refused | JobTerms | OrderFrame | Ack | Pace | Shutdown | Note | Ask | Known | Appoint

_to_orchestrator: Codec[ToOrchestrator] = Codec(ToOrchestrator, "message from an agent")
_to_agent: Codec[ToAgent] = Codec(ToAgent, "message to an agent")


def decode_to_orchestrator(data: bytes | bytearray | memoryview) -> ToOrchestrator:
    """Decode a message that an agent sent. Raises `WireError`."""
    return _to_orchestrator.decode(data)


def decode_to_agent(data: bytes | bytearray | memoryview) -> ToAgent:
    """Decode a message that the orchestrator sent. Raises `WireError`."""
    return _to_agent.decode(data)
