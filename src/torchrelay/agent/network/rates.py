"""Rates: what each path carries, what it usually does, and whether it carries much less. Pure: times are given.

Training sends in bursts and pauses for evaluations, so a path is never judged by itself: it is slow if it carries less
than a share of its usual while the other paths carry theirs, which they would not if there were less to send. With one
path nothing can be told. Bytes out and in are judged apart, as a way may be slow in one direction.

Where there is little to send the core may well leave a path aside that is in order. One that is slow is used as much as
it can take, and what waits in it makes its round trips longer: unless they are, it is not slow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Generic, TypeVar

BUCKET_S = 10.0
KEPT = 360  # buckets from which the usual is known: an hour of traffic
LEAST = 6  # buckets before there is a usual
# Less than this, in bytes a second, is no load by which a path could be judged.
LEAST_RATE = 1_000_000.0
# The other paths show that there is load if they carry this share of their usual.
LOADED = 0.25
# Round trips of a path that is slow are at least this much longer than usual: with half the rate a window takes twice.
LONGER = 1.5
DIRECTIONS = (0, 1)  # sent, received

Key = TypeVar("Key", bound=Hashable)
Bytes = tuple[float, float]  # sent, received


@dataclass
class Flow:
    """One path's traffic. `low_s`: for how long it has been below its share, by direction."""

    bytes: list[float] = field(default_factory=lambda: [0.0, 0.0])  # in the bucket that is being filled
    last: Bytes = (0.0, 0.0)  # bytes a second in the last full bucket
    past: tuple[deque[float], deque[float]] = field(default_factory=lambda: (deque(maxlen=KEPT), deque(maxlen=KEPT)))
    low_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    trips: list[int] = field(default_factory=list)  # round trips in the bucket that is being filled, in us
    trip: float | None = None  # the mean of the last full bucket
    past_trips: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))

    @property
    def waits(self) -> bool:
        """Whether round trips are longer than usual."""
        if self.trip is None or len(self.past_trips) < LEAST:
            return False
        return self.trip >= LONGER * median(self.past_trips)

    def usual(self, direction: int) -> float | None:
        """Its median in times with traffic, in bytes a second; None if it is not known yet, or next to nothing."""
        past = self.past[direction]
        found = median(past) if len(past) >= LEAST else 0.0
        return found if found >= LEAST_RATE else None


class Rates(Generic[Key]):
    """The flows of all paths of a node. `share`: below this part of its usual a path is slow."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._flows: dict[Key, Flow] = {}
        self._begun: float | None = None

    def add(self, key: Key, sent: int, received: int) -> None:
        """So many bytes more went over a path."""
        flow = self._flows.setdefault(key, Flow())
        flow.bytes[0] += sent
        flow.bytes[1] += received

    def time(self, key: Key, round_trip_us: int) -> None:
        """So long a round trip over a path takes now."""
        self._flows.setdefault(key, Flow()).trips.append(round_trip_us)

    def keep(self, keys: Iterable[Key]) -> None:
        """Forget all paths but these."""
        kept = set(keys)
        self._flows = {key: flow for key, flow in self._flows.items() if key in kept}

    def pass_time(self, now: float) -> None:
        """Close the bucket if it is full, and judge by it."""
        if self._begun is None:
            self._begun = now
        length = now - self._begun
        if length < BUCKET_S:
            return
        self._begun = now
        for flow in self._flows.values():
            flow.last = (flow.bytes[0] / length, flow.bytes[1] / length)
            flow.bytes = [0.0, 0.0]
            flow.trip = mean(flow.trips) if flow.trips else None
            flow.trips = []
        verdicts = {(key, one): self._verdict(key, one) for key in self._flows for one in DIRECTIONS}
        for (key, direction), slow in verdicts.items():
            self._note(self._flows[key], direction, slow, length)
        for key, flow in self._flows.items():
            loaded = any(flow.last[one] >= LEAST_RATE for one in DIRECTIONS)
            if flow.trip is not None and loaded and not any(verdicts[key, one] for one in DIRECTIONS):
                flow.past_trips.append(flow.trip)

    def _verdict(self, key: Key, direction: int) -> bool | None:
        """Whether a path was slow in the last bucket; None: it cannot be told."""
        usual = self._flows[key].usual(direction)
        load = self._load(key, direction)
        if usual is None or load is None or load < LOADED:
            return None
        flow = self._flows[key]
        return flow.last[direction] < self._share * min(1.0, load) * usual and flow.waits

    def _load(self, key: Key, direction: int) -> float | None:
        """What the other paths carried, as a part of what they usually do."""
        known = [(flow, flow.usual(direction)) for other, flow in self._flows.items() if other != key]
        usual = sum(rate for _, rate in known if rate is not None)
        return sum(flow.last[direction] for flow, rate in known if rate is not None) / usual if usual else None

    def _note(self, flow: Flow, direction: int, slow: bool | None, length: float) -> None:
        if slow:
            flow.low_s[direction] += length  # what is slow is not usual
            return
        if slow is False:
            flow.low_s[direction] = 0.0
        if flow.last[direction] >= LEAST_RATE:
            flow.past[direction].append(flow.last[direction])

    # ------------------------------------------------------------ looking

    def low_s(self, key: Key) -> float:
        """For how long a path has been slow, in seconds; 0: it is not."""
        flow = self._flows.get(key)
        return max(flow.low_s) if flow is not None else 0.0

    def part(self, key: Key) -> float | None:
        """What it carried in the last full bucket, as a part of its usual, in the worse direction; None: not known."""
        flow = self._flows.get(key)
        known = [] if flow is None else [(flow.last[one], flow.usual(one)) for one in DIRECTIONS]
        return min((last / usual for last, usual in known if usual is not None), default=None)

    def last(self, key: Key) -> Bytes:
        """Bytes a second in the last full bucket, sent and received."""
        flow = self._flows.get(key)
        return flow.last if flow is not None else (0.0, 0.0)

    def evidence(self, key: Key) -> str:
        """How slow it is, in words: `sends 12 of its usual 110 MB/s`."""
        flow = self._flows[key]
        direction = max(DIRECTIONS, key=lambda one: flow.low_s[one])
        verb = ("sends", "receives")[direction]
        return f"{verb} {flow.last[direction] / 1e6:.1f} of its usual {(flow.usual(direction) or 0) / 1e6:.1f} MB/s"
