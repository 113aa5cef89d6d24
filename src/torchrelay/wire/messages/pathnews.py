"""What an agent tells of its node's network paths: for people and figures, not journalled, and nothing follows from it.

What does follow from a path at fault is said as a taint, which is an event like any other.
"""

from __future__ import annotations

from msgspec import Struct

SOURCE = "network"  # of the taints that agents ask for because of their paths


class LinkNews(Struct, frozen=True, kw_only=True):
    """A link: one path to one address of a peer. Rates in bytes a second over the last ten seconds or so.

    Counters are those of all processes since the agent began to listen; `flaps` those within the last hour.
    """

    remote: str
    state: str  # up, suspect, down, unreachable, unused
    state_s: float  # for how long it has been so
    reason: str = ""  # why it was lost last
    live: int = 0  # connections
    round_trip_us: int = 0
    flaps: int = 0
    sent_rate: float = 0.0
    received_rate: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    sent_again: int = 0
    duplicates: int = 0
    corrupt: int = 0


class FindingNews(Struct, frozen=True, kw_only=True):
    """That a path is at fault. `taint`: the key of the taint that was asked for; empty if the fault is not here."""

    kind: str  # down, flapping, slow
    where: str  # here, there, either
    evidence: str
    for_s: float
    taint: str = ""


class PathNews(Struct, frozen=True, kw_only=True):
    """One of a node's paths, with its links."""

    path: int
    interface: str
    local: str
    links: tuple[LinkNews, ...]
    finding: FindingNews | None = None

    @property
    def name(self) -> str:
        return self.interface or self.local


class NetworkNews(Struct, frozen=True, kw_only=True):
    """All paths of a node.

    processes   that use them
    reports     that were heard; `malformed` and `strangers` those that were dropped, by why
    left_out    links beyond the most that are kept
    """

    paths: tuple[PathNews, ...] = ()
    processes: int = 0
    reports: int = 0
    malformed: int = 0
    strangers: int = 0
    left_out: int = 0
