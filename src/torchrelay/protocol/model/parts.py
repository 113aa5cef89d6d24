"""Parts of a job's life, each a value of its own: how it was tried, what went wrong, moves, snapshots, and accounts."""

from __future__ import annotations

from msgspec import Struct

from torchrelay.protocol.messages.events import Snapshot
from torchrelay.protocol.messages.ids import START, Generation, NodeId, Point, Rank, WorkerId
from torchrelay.protocol.model.deaths import Death
from torchrelay.protocol.model.incident import Fault, Incident
from torchrelay.protocol.model.moves import Move, Request
from torchrelay.protocol.model.table import Table


class Attempts(Struct, frozen=True):
    """Starts and generations, and what came of them: none is tried for ever."""

    trained: bool = False  # something was committed since the last start of all workers
    starts: int = 0  # starts of all workers in a row that committed nothing
    failed_starts: int = 0  # of these, those that the script may have failed
    restarts: int = 0  # starts from the script's own checkpoint
    fruitless: int = 0  # generations in a row that were tried, and in which nothing was committed
    advanced_in: Generation = Generation(0)  # which went on from a further point than the one before, the last time

    def going_on(self, generation: Generation, *, advanced: bool) -> Attempts:
        """When this generation has a point to go on from. `advanced`: there was none, or it is further than that."""
        return Attempts(trained=True, restarts=self.restarts, advanced_in=generation) if advanced else self


class Raised(Struct, frozen=True):
    """An exception that a worker told of, and the exit code it led to when known."""

    worker: WorkerId
    rank: Rank
    point: Point | None
    signature: str
    summary: str
    at_ms: int
    fatal: bool  # False: its process was interrupted anyway and stays
    cramped: bool  # out of memory in a slot that is shared: that says nothing about the script
    code: int | None = None


class Exceptions(Struct, frozen=True):
    """What workers told of or died of: an error of the script's own is found by its coming twice."""

    raised: tuple[Raised, ...] = ()
    deaths: tuple[Death, ...] = ()  # ends of workers, by themselves, while they trained
    last_code: int = 1
    broken: Fault | None = None  # a collective has failed, and nobody is known to be lost
    broken_ms: int = 0  # since when that is known


class Moving(Struct, frozen=True):
    """Moves: those that operators want, those that were made, and the one under way."""

    requests: Table[Rank, Request] = Table()  # what operators want
    moves: tuple[Move, ...] = ()  # the newest last; at most one is open
    named: int = 0  # moves so far
    cutovers: tuple[int, ...] = ()  # when ranks were moved within the last hour


class Rollback(Struct, frozen=True):
    """Snapshots, and going back to them."""

    every: int = 0  # steps between two snapshots; 0: none are taken
    buddies: int = 1  # nodes that get a copy of each, beside its own
    kept: Table[NodeId, tuple[Snapshot, ...]] = Table()  # snapshots, by the node in whose memory they lie
    point: Point | None = None  # the snapshot from which all ranks begin anew, until training goes on
    furthest: Point = START  # from which it was ever gone back to a snapshot
    times: int = 0  # how often, without getting any further


class Parking(Struct, frozen=True):
    """The job is to write itself down and to end, or goes on from where it was written down."""

    reason: str = ""  # why it is to park; empty: it is not
    source: str = ""
    asked_ms: int = 0
    deadline_ms: int | None = None  # when its nodes are gone
    number: int = 0  # see `ParkAsked`
    name: str = ""  # of the parking under way, from the first halt for it until it is given up or a fault comes
    tries: int = 0  # that came to nothing
    again_ms: int = 0  # not before this time
    rests_ms: int = 0  # until when what was given up is not begun of our own accord
    why_not: str = ""  # why the last try came to nothing, or why it has not begun
    takes_ms: int = 0  # how long writing is expected to take, as the slowest node has measured
    # While all come back from a parking: of which ranks a node finds the files, None: of all; at last None: it is over.
    found: Table[NodeId, tuple[Rank, ...] | None] | None = None

    @property
    def asked(self) -> bool:
        return bool(self.reason)


class Accounting(Struct, frozen=True):
    """What the ledger shows of a job."""

    incidents: tuple[Incident, ...] = ()
    unproved: int = 0  # incidents after which all went on, and have committed nothing yet
    left_out_ms: int = 0  # what the clock has left out since the job was submitted


class PassedOn(Struct, frozen=True):
    """A signal for all ranks: which signal, its number among those of the job, and when it was asked for."""

    number: int
    nth: int
    at_ms: int


class Signals(Struct, frozen=True):
    """What is passed on to the ranks."""

    fresh: tuple[PassedOn, ...] = ()  # for ranks that have not had them
    count: int = 0  # how many there were so far
