"""What simulated nodes say to one another about successions, what they keep, and what they may forget to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torchrelay.protocol.succession.succession import CopyId, Place, Succession, VoterId
from torchrelay.protocol.succession.voter import Ballot

Order = tuple[int, int]


class Note(NamedTuple):
    """A head asks a voter to note what it proposes, or says that it is settled."""

    voter: VoterId
    succession: Succession


class Noted(NamedTuple):
    voter: VoterId
    order: Order


class Ask(NamedTuple):
    """A candidate asks for a promise."""

    voter: VoterId
    lease: int
    copy: CopyId


class Answer(NamedTuple):
    voter: VoterId
    copy: CopyId
    ballot: Ballot
    granted: bool


class Base(NamedTuple):
    """A head begins to copy its journal: all that it had when it became head."""

    lease: int
    place: Place
    number: int  # copies of one lease are numbered, so that an older one that comes late does not replace a newer one
    have: dict[int, int]
    known: Succession


class Part(NamedTuple):
    lease: int
    copy: CopyId
    number: int
    item: Succession | None


class Held(NamedTuple):
    lease: int
    copy: CopyId
    part: int


Word = Note | Noted | Ask | Answer | Base | Part | Held


@dataclass
class Disk:
    """A copy of the journal, as it is on the disk of a node.

    place   under which name it can be an heir or a head
    source  under which lease it is written, and the number of the copy among those of this lease
    have    how many parts of each lease it has
    known   the newest succession in it
    """

    place: Place
    source: tuple[int, int] = (0, 0)
    have: dict[int, int] = field(default_factory=dict)
    known: Succession | None = None


@dataclass(frozen=True)
class Duties:
    """What `succession` asks of those who use it. A test leaves one out, to see that it is needed.

    keeps_promises    a voter that has lost its memory is another voter
    keeps_copies      a copy that has lost its end is another copy
    keeps_proposals   what a head proposes is on its disk
    bars              who has become head takes in nothing of a lower lease
    waits             who is proposed as an heir has all that has left
    """

    keeps_promises: bool = True
    keeps_copies: bool = True
    keeps_proposals: bool = True
    bars: bool = True
    waits: bool = True


DUTIES = Duties()
