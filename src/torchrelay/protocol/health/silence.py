"""Silence: how long a node may not be heard before it is lost. Its own beats set that:

    limit = clamp(4 x the longest gap between its beats in the last 5 to 10 minutes, 6 s, 30 s)

A gap as long as it is told to wait between two beats (0.5 s; longer where there are more than 250 nodes) is one, too.

It counts from its last beat, or from when a rank on another node last committed a point of a job that has ranks on
this one, whichever is later: each gate needs all ranks, so whoever passes one proves that the silent node's workers
live, and that only its agent cannot be heard. (Steps longer than the limit prove nothing in time.)

If all nodes are silent at once, it is the orchestrator that hears nothing (see `deafness`), and nobody could take over
anyway: none is lost before 60 s. When the first is heard again, the silence counts as a gap between the beats of each:
the others have up to 30 s from then to come back.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from torchrelay.protocol.messages.ids import NodeId

# A silent node is lost after this many of the longest gaps between its beats, but not before and not after:
SILENT_GAPS = 4
LEAST_SILENCE_MS = 6_000
MOST_SILENCE_MS = 30_000
# If all are silent for so long, nobody is lost before they have been for that long.
ALL_SILENT_MS = 2_000
DEAF_MS = 60_000
# Gaps are remembered for this long, and at most for twice as long.
GAPS_MS = 300_000


class Rhythm(Struct, frozen=True):
    """The longest gaps between a node's beats: in this span of `GAPS_MS`, and in the one before it."""

    since_ms: int
    gap_ms: int = 0
    before_ms: int = 0

    def note(self, gap_ms: int, now_ms: int) -> Rhythm:
        """After a beat that came so long after the last one."""
        spans = (now_ms - self.since_ms) // GAPS_MS
        if spans == 0:
            return self if gap_ms <= self.gap_ms else replace(self, gap_ms=gap_ms)
        return Rhythm(now_ms, gap_ms, self.gap_ms if spans == 1 else 0)

    @property
    def longest_ms(self) -> int:
        return max(self.gap_ms, self.before_ms)

    def limit_ms(self, beat_ms: int = 0) -> int:
        """The silence after which the node is lost. `beat_ms`: how long it is to wait between two beats."""
        return max(LEAST_SILENCE_MS, min(MOST_SILENCE_MS, SILENT_GAPS * max(self.longest_ms, beat_ms)))


class Silence(Struct, frozen=True):
    """A node that has not been heard of late.

    lost_in_ms   how long it has left if nothing is heard of it; 0: it is lost
    advanced_ms  how long ago ranks on other nodes committed a point together with ranks on this one, if they did
                 since its last beat: its workers live
    """

    node: NodeId
    silent_ms: int
    limit_ms: int
    lost_in_ms: int
    advanced_ms: int | None = None
    all_silent: bool = False

    def __str__(self) -> str:
        """For people: "silent for 12.0 s, but its ranks train on"."""
        told = f"silent for {self.silent_ms / 1000:.1f} s"
        if self.all_silent:  # mostly the time stands still
            return f"{told} or more, and so are all: it may be the orchestrator that hears nothing"
        if self.advanced_ms is not None and self.lost_in_ms > 0:
            return f"{told}, but its ranks train on"
        return f"{told} (limit {self.limit_ms / 1000:.1f} s)"
