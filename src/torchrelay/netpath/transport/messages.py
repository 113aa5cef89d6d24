"""Messages from one rank to another: send, recv, and recv from whoever sends first.

Each direction between two ranks has a comm of its own for each tag, and a thread at either end. A message is preceded
by its length. A receiver asks for the length of the next message as soon as somebody waits for one; when that has
come it is known whose the message is: of who has asked for this sender, or for any, whoever asked first. So a message
is taken in by one of them, and nothing is kept for nobody.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from torchrelay.netpath.transport import direct
from torchrelay.netpath.transport.mesh import Broken, Mesh, Stream
from torchrelay.netpath.transport.work import Work

LOOK_S = 0.1  # between two looks at whether anybody still waits


@dataclass
class Wish:
    """A message that somebody wants to send, or to have."""

    work: Work
    memory: torch.Tensor  # from which, or into which
    until: float
    arrived: Callable[[], object]  # called when it is in the memory
    number: int = field(default_factory=itertools.count().__next__)  # who asks first gets the first message


class _Channel:
    """What goes one way between two ranks, with one tag."""

    def __init__(self, peer: int, tag: int) -> None:
        self.peer, self.tag = peer, tag
        self.wishes: deque[Wish] = deque()
        self.busy = False
        self.length = torch.zeros(1, dtype=torch.int64)  # receiver: of the next message
        self.asked = self.known = False  # whether its length is asked for, and there
        self.thread: threading.Thread | None = None


class Messages:
    """All that goes from one rank to another in a group, from one meeting to the next."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._changed = threading.Condition()
        self._channels: dict[tuple[bool, int, int], _Channel] = {}
        self._anybody: dict[int, deque[Wish]] = {}  # by tag
        self._to_self: dict[int, deque[Wish]] = {}  # by tag: what this rank sends to itself
        self._stopped = False
        mesh.on_break.append(self._wake)

    def send(self, wish: Wish, peer: int, tag: int) -> None:
        """Send the wish's memory; its work ends when that has got through."""
        if peer != self._mesh.rank:
            self._ask(wish, peer, tag, sends=True)
            return
        with self._changed:
            if not self._over:
                self._to_self.setdefault(tag, deque()).append(wish)
                self._channel(peer, tag, sends=False)  # its thread fails the wish if nobody ever takes it in
                self._changed.notify_all()
                return
        wish.work.end(self._why())

    def receive(self, wish: Wish, peer: int, tag: int) -> None:
        """Take in the next message of a rank."""
        self._ask(wish, peer, tag, sends=False)

    def receive_any(self, wish: Wish, tag: int) -> None:
        """Take in the next message of whoever sends first, with this tag."""
        with self._changed:
            if not self._over:
                self._anybody.setdefault(tag, deque()).append(wish)
                for peer in range(self._mesh.size):
                    self._channel(peer, tag, sends=False)
                self._changed.notify_all()
                return
        wish.work.end(self._why())

    def _ask(self, wish: Wish, peer: int, tag: int, *, sends: bool) -> None:
        with self._changed:
            if not self._over:
                self._channel(peer, tag, sends=sends).wishes.append(wish)
                self._changed.notify_all()
                return
        wish.work.end(self._why())

    def _channel(self, peer: int, tag: int, *, sends: bool) -> _Channel:
        channel = self._channels.get((sends, peer, tag))
        if channel is None:
            channel = _Channel(peer, tag)
            about = f"torchrelay {'to' if sends else 'from'} {peer} tag {tag}"
            serve = self._serve_sender if sends else self._serve_receiver
            channel.thread = threading.Thread(target=serve, args=(channel,), name=about, daemon=True)
            channel.thread.start()  # waits for the lock, and raises if there can be no more threads
            self._channels[sends, peer, tag] = channel
        return channel

    # ------------------------------------------------------------ the end

    def drain(self, until: float) -> bool:
        """Wait until all messages have got through. Returns whether they have."""
        with self._changed:
            return self._changed.wait_for(self._nothing_to_do, timeout=max(0.0, until - time.monotonic()))

    def _nothing_to_do(self) -> bool:
        waiting = any(channel.wishes or channel.busy for channel in self._channels.values())
        return not waiting and not any(self._anybody.values()) and not any(self._to_self.values())

    def stop(self, until: float) -> bool:
        """End all threads; what has not got through fails. Returns whether none uses the mesh any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        threads = [channel.thread for channel in self._channels.values() if channel.thread is not None]
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    @property
    def _over(self) -> bool:
        return self._stopped or bool(self._mesh.broken)

    # ------------------------------------------------------------ a sender's thread

    def _serve_sender(self, channel: _Channel) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: channel.wishes or self._over)
                if self._over:
                    break
                wish = channel.wishes.popleft()
                channel.busy = True
            self._fulfil(channel, wish, self._send)
        self._fail_all(channel.wishes)

    def _send(self, channel: _Channel, wish: Wish) -> None:
        way = self._mesh.to(channel.peer, wish.until, channel.tag + 1)
        way.post(torch.tensor([wish.memory.nbytes], dtype=torch.int64), wish.until)
        for piece in direct.pieces(wish.memory):
            way.post(piece, wish.until)
        way.finish(wish.until)

    # ------------------------------------------------------------ a receiver's thread

    def _serve_receiver(self, channel: _Channel) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._first_for(channel) or self._over)
                first = self._first_for(channel)
                if self._over or first is None:
                    break
                channel.busy = channel.known and self._take(channel, first)
            if channel.busy:
                channel.asked = channel.known = False
                self._fulfil(channel, first, self._receive)
            elif not channel.known:
                self._listen(channel, first)
        self._fail_all(channel.wishes)
        with self._changed:
            left = [*self._anybody.pop(channel.tag, ()), *self._to_self.pop(channel.tag, ())]
        self._fail_all(deque(left))

    def _first_for(self, channel: _Channel) -> Wish | None:
        """Who is to get this channel's next message. The lock is held."""
        wishes = [line[0] for line in (channel.wishes, self._anybody.get(channel.tag)) if line]
        return min(wishes, key=lambda wish: wish.number, default=None)

    def _take(self, channel: _Channel, wish: Wish) -> bool:
        (channel.wishes if channel.wishes and channel.wishes[0] is wish else self._anybody[channel.tag]).popleft()
        return True

    def _listen(self, channel: _Channel, first: Wish) -> None:
        """Wait for a while for the length of the next message."""
        until = min(first.until, time.monotonic() + LOOK_S)
        try:
            if channel.peer == self._mesh.rank:
                channel.known = self._hear_self(channel, until)
                return
            way = self._mesh.of(channel.peer, until, channel.tag + 1)
            if not channel.asked:
                way.post(channel.length, until)
                channel.asked = True
            way.finish_oldest(until)
            channel.known = True
        except TimeoutError:
            if time.monotonic() >= first.until:
                self._mesh.break_off(f"{first.work.what} has waited for too long")
        except Exception as error:  # noqa: BLE001  whatever it is, who waits must hear of it
            self._mesh.break_off(f"{first.work.what}: {error}")

    def _hear_self(self, channel: _Channel, until: float) -> bool:
        """Wait for what this rank sends to itself. Returns whether there is something; raises `TimeoutError` if not."""
        with self._changed:
            self._changed.wait_for(lambda: self._to_self.get(channel.tag) or self._over, until - time.monotonic())
            if self._to_self.get(channel.tag):
                return True
        raise TimeoutError

    def _receive_from_self(self, channel: _Channel, wish: Wish) -> None:
        with self._changed:
            sent = self._to_self[channel.tag].popleft()
        try:
            self._fit(channel, sent.memory.nbytes, wish)
            wish.memory.view(torch.uint8).copy_(sent.memory.view(torch.uint8))
            wish.arrived()
        except BaseException:
            with self._changed:  # it fails with all that is left
                self._to_self.setdefault(channel.tag, deque()).appendleft(sent)
            raise
        sent.work.end()

    def _fit(self, channel: _Channel, length: int, wish: Wish) -> None:
        if length != wish.memory.nbytes:
            raise ValueError(f"rank {channel.peer} has sent {length} bytes, and there is room for {wish.memory.nbytes}")

    def _receive(self, channel: _Channel, wish: Wish) -> None:
        if channel.peer == self._mesh.rank:
            self._receive_from_self(channel, wish)
            return
        self._fit(channel, int(channel.length), wish)
        way: Stream = self._mesh.of(channel.peer, wish.until, channel.tag + 1)
        for piece in direct.pieces(wish.memory):
            way.post(piece, wish.until)
        way.finish(wish.until)
        wish.arrived()

    # ------------------------------------------------------------ how it ends

    def _fulfil(self, channel: _Channel, wish: Wish, do: Callable[[_Channel, Wish], None]) -> None:
        error: Broken | None = None
        try:
            with torch.inference_mode():
                do(channel, wish)
        except Exception as fault:  # noqa: BLE001  whatever it is, who waits must hear of it
            waited = isinstance(fault, TimeoutError) and not str(fault)
            self._mesh.break_off(f"{wish.work.what}: {'has waited for too long' if waited else fault}")
            error = self._why()
        with self._changed:
            channel.busy = False
            self._changed.notify_all()
        wish.work.end(error, channel.peer)

    def _fail_all(self, wishes: deque[Wish]) -> None:
        while wishes:
            wishes.popleft().work.end(self._why())

    def _why(self) -> Broken:
        try:
            self._mesh.check()
        except Broken as error:
            return error
        return Broken(f"torchrelay.netpath: group '{self._mesh.name}' was closed")
