"""What a group communicates with: its mesh, its messages, and the line of its collectives; replaced at each meeting.

They outlive the group object for as long as a thread of theirs lives, and hold no reference to it.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref

from torchrelay.netpath.transport.line import Line
from torchrelay.netpath.transport.mesh import Broken, Meeting, Mesh
from torchrelay.netpath.transport.messages import Messages

END_S = 5.0  # how long threads may take to notice that their connections are broken


class Connections:
    """Of one group, in this process. A forked child has none: there all of this does nothing."""

    def __init__(self, name: str, rank: int, size: int) -> None:
        self.name, self.rank, self.size = name, rank, size
        self.line = Line(name)
        self.mesh: Mesh | None = None  # None: alone, nothing is sent
        self.messages: Messages | None = None
        self._process = os.getpid()
        self._closed = False

    def check(self) -> None:
        """Raise `Broken` if nothing can be begun here any more."""
        if self._closed:
            raise Broken(f"torchrelay.netpath: group '{self.name}' was destroyed")
        if os.getpid() != self._process:
            raise Broken(
                f"torchrelay.netpath: group '{self.name}' belongs to the process that this one was forked from"
            )

    def meet(self, store: Meeting) -> None:
        """Leave the old connections and begin new ones, which are made when they are first used.

        Raises `Broken` if threads do not let go of the old ones, and `NotBuilt`, `NetError`.
        """
        # Until there are new ones the old stay in their place, broken: alone a group would only pretend to work.
        self._let_go("the group is being connected anew")
        mesh = Mesh(store, self.rank, self.size, self.name)
        self.messages = Messages(mesh)
        self.mesh = mesh
        if not _all:
            atexit.register(_close_all)  # after the engine's: what is registered last is called first
        _all.add(self)

    def abort(self, why: str) -> bool:
        """All who wait in it fail now. From any thread. Returns whether there was anything to break."""
        mesh = self.mesh
        if mesh is None or mesh.broken or os.getpid() != self._process:
            return False
        mesh.break_off(why)
        return True

    def leave(self, why: str) -> None:
        """Break and let go of the connections: the group is alone from then on. Raises `Broken` if that takes long."""
        self._let_go(why)
        self.mesh = self.messages = None

    def _let_go(self, why: str) -> None:
        if self.mesh is None or os.getpid() != self._process:
            return
        self.abort(why)
        if not self._close(time.monotonic() + END_S):
            raise Broken(f"torchrelay.netpath: group '{self.name}' is still in a collective {END_S:g} s after its end")

    def finish(self, until: float) -> None:
        """Let what was begun come to its end, and let go of the connections; nothing can be begun any more."""
        self._closed = True
        if self.mesh is None or os.getpid() != self._process:
            return
        assert self.messages is not None
        if not self.line.drain(until) or not self.messages.drain(until):
            self.mesh.break_off("the group was closed before all was done")
        if self._close(time.monotonic() + END_S, until):
            self.mesh = self.messages = None
        self.line.close()

    def drop(self) -> None:
        """Nobody has the group any more: `finish`, and wait for nothing.

        In a thread of its own, as garbage is collected anywhere: where a lock of ours is held, or in a thread of ours.
        """
        self._closed = True
        if self.mesh is not None and os.getpid() == self._process:
            threading.Thread(
                target=self.finish, args=(0.0,), name=f"torchrelay end of {self.name}", daemon=True
            ).start()

    def _close(self, until: float, last_words_until: float = 0.0) -> bool:
        """Let go of the mesh, when no thread uses it any more. Returns whether that was so in time."""
        mesh, messages = self.mesh, self.messages
        assert mesh is not None
        assert messages is not None
        if not self.line.drain(until) or not messages.stop(until):
            return False
        mesh.close(last_words_until)
        return True


_all: weakref.WeakSet[Connections] = weakref.WeakSet()


def _close_all() -> None:
    """When the process ends: before the engine stops, which frees what threads may still use."""
    for connections in tuple(_all):
        connections.finish(time.monotonic())
