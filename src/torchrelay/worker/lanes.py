"""Lanes: connections from rank to rank over which their main threads talk straight to one another, in every gate.

A lane goes one way, from the rank that has made it, and serves one *purpose*: private records (`buddies`), or the gate
itself (`rounds`). Lanes are made anew at every rewire, by way of the state servers, and proved as transfers are. They
belong to no group: nothing is counted for them, and a fault breaks them from another thread.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import Store

from torchrelay.protocol.ids import Generation, Rank
from torchrelay.protocol.orders import Rewire
from torchrelay.worker import groups
from torchrelay.worker.stream import Stream, StreamBroken
from torchrelay.worker.transfer import open_lane

if TYPE_CHECKING:
    from torchrelay.worker.session import Session

AGAIN_S = 0.05  # between attempts to reach a rank, to which several others come at once

Wanted = Mapping[str, tuple[Sequence[Rank], Sequence[Rank]]]  # by purpose: to whom we send, and from whom we receive


class Parted(RuntimeError):
    """The connection to another rank is of no use any more."""


@dataclass
class Ends:
    """Our ends of the lanes of one purpose, in the order in which they were asked for."""

    to: list[socket.socket] = field(default_factory=list)
    by: dict[Rank, socket.socket] = field(default_factory=dict)


class Lanes:
    """All lanes of one rank.

    The main thread makes and uses them; threads of the state server bring those that others make; the control thread
    cuts.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._generation = Generation(0)
        self._cut_off = False  # for whoever waits for others
        self._came: dict[tuple[Generation, str, Rank], socket.socket] = {}  # not taken up yet
        self._ends: list[socket.socket] = []  # of this generation

    # ------------------------------------------------------------ the main thread

    def meet(
        self, session: Session, order: Rewire, store: Store, wanted: Wanted, timeout_s: float
    ) -> tuple[dict[str, Ends], dict[Rank, str]]:
        """All groups are connected anew: make the lanes of this generation, and let go of those before.

        Returns our ends by purpose, and the addresses of the state servers that we send to. Raises `RewireError`. Until
        `limit` says otherwise none of them waits for longer than is left of `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        self.part()
        with self._changed:
            self._generation, self._cut_off = order.generation, False
        found = {purpose: Ends() for purpose in wanted}
        addresses: dict[Rank, str] = {}
        try:
            if any(by for _, by in wanted.values()):
                store.set(f"torchrelay/{order.generation}/lanes/{order.rank}", session.server.address)
            for purpose, (to, _) in wanted.items():
                for other in to:
                    if other not in addresses:
                        addresses[other] = store.get(f"torchrelay/{order.generation}/lanes/{other}").decode()
                    lane = self._reach(addresses[other], session.welcome.secret, order, purpose, deadline)
                    found[purpose].to.append(self._keep(lane))
            for purpose, (_, by) in wanted.items():
                for other in by:
                    found[purpose].by[other] = self._keep(self._await(purpose, other, deadline))
        except RuntimeError as error:  # the store's own errors derive from it
            raise groups.RewireError(f"connecting rank to rank: {error}") from error
        for ends in found.values():
            limit(ends, max(0.001, deadline - time.monotonic()))
        return found, addresses

    def _keep(self, lane: socket.socket) -> socket.socket:
        with self._changed:
            self._ends.append(lane)
            if self._cut_off:
                _shut_down(lane)
        return lane

    def _reach(self, address: str, secret: bytes, order: Rewire, purpose: str, deadline: float) -> socket.socket:
        while True:
            try:
                return open_lane(address, secret, order.generation, purpose, order.rank, deadline).release()
            except StreamBroken as error:
                if self._cut_off or time.monotonic() + AGAIN_S > deadline:
                    raise Parted(f"the rank at {address} is not reached: {error}") from error
                time.sleep(AGAIN_S)

    def _await(self, purpose: str, other: Rank, deadline: float) -> socket.socket:
        with self._changed:
            while (lane := self._came.pop((self._generation, purpose, other), None)) is None:
                left = deadline - time.monotonic()
                if self._cut_off or left <= 0:
                    raise Parted(f"rank {other} did not come")
                self._changed.wait(left)
        return lane

    def part(self) -> None:
        """Let go of the lanes of the generation before."""
        with self._changed:
            over, self._ends = self._ends, []
        for lane in over:
            lane.close()

    def close(self) -> None:
        """Let go of all lanes."""
        self.part()
        with self._changed:
            while self._came:
                self._came.popitem()[1].close()

    # ------------------------------------------------------------ other threads

    def adopt(self, generation: Generation, purpose: str, other: Rank, stream: Stream) -> None:
        """A rank has connected to our state server; perhaps before we have heard that it will."""
        with self._changed:
            lane = stream.release()
            for old in [key for key in self._came if key[0] < generation or key == (generation, purpose, other)]:
                self._came.pop(old).close()
            self._came[generation, purpose, other] = lane
            self._changed.notify_all()

    def cut(self) -> int:
        """Whoever waits at a lane, or for one, fails at once. Returns how many were cut."""
        with self._changed:
            self._cut_off = True
            self._changed.notify_all()
            return sum(map(_shut_down, self._ends))


def limit(ends: Ends, seconds: float) -> None:
    """How long one system call on these lanes may wait; 0: for ever."""
    packed = struct.pack("@ll", int(seconds), int(seconds % 1 * 1_000_000))
    for lane in (*ends.to, *ends.by.values()):
        lane.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, packed)
        lane.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, packed)


def receive(lane: socket.socket, memory: memoryview, least: int) -> int:
    """Fill memory with `least` bytes, or more if they are there; returns how many. Raises `OSError`."""
    came = 0
    while came < least:
        count = lane.recv_into(memory[came:])
        if count == 0:
            raise ConnectionError("the other side has closed the connection")
        came += count
    return came


def _shut_down(lane: socket.socket) -> bool:
    try:
        lane.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False  # it was not connected any more
    return True
