"""Lanes: connections from rank to rank over which their main threads talk straight to one another, in every gate.

A lane goes one way, from the rank that has made it, and serves one *purpose*: private records (`buddies`), or the gate
itself (`rounds`). Lanes are made again at every reconfigure, by way of the state servers, and proved as transfers are.
They belong to no group: nothing is counted for them, and a fault breaks them from another thread.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch._C._distributed_c10d import Store

from torchrelay.protocol.messages.ids import Generation, Rank
from torchrelay.protocol.messages.orders import Reconfigure
from torchrelay.wire.trust import trust
from torchrelay.worker.process_groups import groups
from torchrelay.worker.transfer.request import Cancel
from torchrelay.worker.transfer.stream import Connected, Stream, StreamBroken, limit_calls
from torchrelay.worker.transfer.tls import Tls, TlsSocket
from torchrelay.worker.transfer.transfer import open_lane

AGAIN_S = 0.05  # between attempts to reach a rank, to which several others come at once
_OURS = "torchrelay.worker."
ALIVE_S = 60  # a machine that has not answered for so long, or a path to it, is gone

Wanted = Mapping[str, tuple[Sequence[Rank], Sequence[Rank]]]  # by purpose: to whom we send, and from whom we receive


class Parted(RuntimeError):
    """The connection to another rank is of no use any more."""


@dataclass
class Ends:
    """Our ends of the lanes of one purpose, in the order in which they were asked for."""

    to: list[Connected] = field(default_factory=list)
    by: dict[Rank, Connected] = field(default_factory=dict)

    def lanes(self) -> Iterator[Connected]:
        """All of them."""
        yield from self.to
        yield from self.by.values()

    def part(self) -> None:
        """They are of no use any more, to us and to those at their other ends."""
        for lane in self.lanes():
            _shut_down(lane)


class Lanes:
    """All lanes of one rank.

    The main thread makes and uses them; threads of the state server bring those that others make; the control thread
    cuts.
    """

    def __init__(self, tls: Tls | None = None) -> None:
        """`tls`: of this process, if what goes between workers is encrypted."""
        self._tls = tls
        self._changed = threading.Condition()
        self._generation = Generation(0)
        self._cancel = Cancel()  # of whoever reaches out for others, or waits for them
        self._came: dict[tuple[Generation, str, Rank], Connected] = {}  # not taken up yet
        self._ends: list[Connected] = []  # of this generation

    # ------------------------------------------------------------ the main thread

    def meet(
        self, address: str, secret: bytes, order: Reconfigure, store: Store, wanted: Wanted, timeout_s: float
    ) -> tuple[dict[str, Ends], dict[Rank, str]]:
        """All groups are connected anew: make the lanes of this generation, and let go of those before.

        `address`: of our own state server. Returns our ends by purpose, and the addresses of the state servers that we
        send to. Raises `ReconfigureError`. Until `limit` says otherwise none of them waits for longer than is left of
        `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        self.part()
        with self._changed:
            self._generation, self._cancel = order.generation, Cancel()
        keys = trust.keys_of(secret, order.generation)
        found = {purpose: Ends() for purpose in wanted}
        addresses: dict[Rank, str] = {}
        try:
            if any(by for _, by in wanted.values()):
                store.set(f"{keys}/lanes/{order.rank}", address)
            for purpose, (to, _) in wanted.items():
                for other in to:
                    if other not in addresses:
                        addresses[other] = store.get(f"{keys}/lanes/{other}").decode()
                    lane = self._reach(addresses[other], secret, order, purpose, deadline)
                    found[purpose].to.append(self._keep(lane))
            for purpose, (_, by) in wanted.items():
                for other in by:
                    found[purpose].by[other] = self._keep(self._await(purpose, other, deadline))
        except RuntimeError as error:  # the store's own errors derive from it
            raise groups.ReconfigureError(f"connecting rank to rank: {error}") from error
        for ends in found.values():
            limit_waits(ends, max(0.001, deadline - time.monotonic()))
        return found, addresses

    def _keep(self, lane: Connected) -> Connected:
        with self._changed:
            self._ends.append(lane)
            if self._cancel.cancelled:
                _shut_down(lane)
        return lane

    def _reach(self, address: str, secret: bytes, order: Reconfigure, purpose: str, deadline: float) -> Connected:
        cancel = self._cancel
        while True:
            try:
                lane = open_lane(address, secret, order.generation, purpose, order.rank, deadline, cancel, self._tls)
                return lane.release()
            except StreamBroken as error:
                if cancel.cancelled or time.monotonic() + AGAIN_S > deadline:
                    raise Parted(f"the rank at {address} is not reached: {error}") from error
                time.sleep(AGAIN_S)

    def _await(self, purpose: str, other: Rank, deadline: float) -> Connected:
        with self._changed:
            while (lane := self._came.pop((self._generation, purpose, other), None)) is None:
                left = deadline - time.monotonic()
                if self._cancel.cancelled or left <= 0:
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
            self._cancel.cancel()
            self._changed.notify_all()
            return sum(map(_shut_down, self._ends))


def limit_waits(ends: Ends, seconds: float) -> None:
    """How long one system call on these lanes may wait."""
    for lane in ends.lanes():
        limit_calls(lane, seconds)


def watch_over(ends: Ends, *, short: bool) -> None:
    """Who waits at one of these lanes fails after about `ALIVE_S` if the machine at its other end does not answer.

    The machine and not the process, which may be at its step, or stopped: that is for others to find out. `short`: all
    that is ever sent has room in the other machine's memory. Else a process that does not read would count as gone.
    """
    for lane in ends.lanes():
        lane.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        lane.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ALIVE_S // 2)
        lane.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ALIVE_S // 6)
        lane.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        if short:
            lane.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * ALIVE_S)  # of what is sent


def parted_error(what: str, error: OSError) -> Parted:
    """What to raise for a system call that has failed.

    Raises the error itself if no system call has: then it is the script's, from a handler of a signal that came while
    we waited (`TimeoutError` is an `OSError`).
    """
    where = error.__traceback__
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    if where is not None and not str(where.tb_frame.f_globals.get("__name__")).startswith(_OURS):
        raise error
    waited = isinstance(error, BlockingIOError)
    return Parted(f"{what}: {'nothing has moved for as long as it may take' if waited else error}")


def send_now(lane: Connected, message: Sequence[bytes | memoryview], size: int) -> bytes | None:
    """Send these `size` bytes as far as there is room for them. None: all of them. Raises `OSError`.

    Else what `lane.sendall` must be given for the rest; it may be empty, as TLS has encrypted bytes of its own left.
    """
    if isinstance(lane, TlsSocket):
        return lane.send_now(b"".join(message))
    try:
        sent = lane.sendmsg(message, (), socket.MSG_DONTWAIT)
    except BlockingIOError:
        sent = 0
    return b"".join(message)[sent:] if sent < size else None


def receive_into(lane: Connected, memory: memoryview, least: int, came: int) -> int:
    """Fill memory up to `least` bytes, or more if they are there; returns how many. Raises `OSError`.

    `came`: what a first `recv_into` has returned, which takes in most messages whole; 0: the end of the connection.
    """
    count = came
    while count and came < least:
        count = lane.recv_into(memory[came:])
        came += count
    if not count:
        raise ConnectionResetError(errno.ECONNRESET, "the other side has closed the connection")
    return came


def _shut_down(lane: Connected) -> bool:
    try:
        lane.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False  # it was not connected any more
    return True
