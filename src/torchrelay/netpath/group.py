"""A process group over several network paths: its life, and how a collective of it is begun and ends.

It is connected at a store, lazily. It can be aborted from any thread, and then connected anew at another store, with
the same rank, as the same object. Not connected at all it is *alone*: collectives do nothing, as with torch's fake
backend.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchrelay.netpath.tensors import Written
from torchrelay.netpath.transport.mesh import Broken, Meeting, Mesh
from torchrelay.netpath.transport.messages import Messages, Wish
from torchrelay.netpath.transport.work import Line, Work, finished

NAME = "torchrelay"
CPU = torch.device("cpu")
Do = Callable[[Mesh, float], None]  # over this mesh, until this time


class Options:
    """What torch asks a backend for."""

    def __init__(self, timeout: timedelta) -> None:
        self.backend = NAME
        self._timeout = timeout
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""


class PathGroup(dist.ProcessGroup):
    """What is the same for all collectives. All calls may be made from any thread."""

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def __init__(self, store: Meeting | None, rank: int, size: int, timeout: timedelta, name: str = "") -> None:
        """`store` is used by this group alone (a PrefixStore); without one the group is alone until `connect`.

        Raises `NotBuilt`, and `NetError` for settings that cannot be meant.
        """
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.options = Options(timeout)
        self._names = {"name": name, "description": "undefined"}
        self._store = store
        self._begun = 0
        self._connections = Connections(name, rank, size)
        weakref.finalize(self, self._connections.drop).atexit = False
        if store is not None:
            self._connections.meet(store)

    # ------------------------------------------------------------ its life

    def connect(self, store: Meeting) -> None:
        """Leave the connections there are, and meet the others at `store`, where nobody has met before.

        All ranks do so, each with the rank that it has. What is under way fails. A connection is made when it is first
        used. Raises `Broken` if a collective does not end, `NotBuilt`, `NetError`.
        """
        self._connections.meet(store)
        self._store = store

    def leave(self) -> None:
        """Let go of the connections: from now on the group is alone. Raises `Broken` if a collective does not end."""
        self._connections.leave("the group left its connections")

    def abort(self) -> None:
        """All who wait in this group fail now, and on other ranks who waits for this one; so does what follows.

        From any thread. The group can be used again when it was told to `connect`.
        """
        self._connections.abort("the group was aborted")

    def shutdown(self) -> None:
        """Let what was begun come to its end, and close the connections."""
        self._connections.finish(time.monotonic() + self.options._timeout.total_seconds())

    @property
    def alone(self) -> bool:
        """Whether there are no connections, and collectives do nothing."""
        return self._connections.mesh is None

    @property
    def broken(self) -> str:
        """Why its connections are of no use any more; empty if all is well."""
        mesh = self._connections.mesh
        return mesh.broken if mesh is not None else ""

    # ------------------------------------------------------------ collectives

    def _begin(
        self, kind: str, results: Sequence[torch.Tensor], do: Do, opts: Any, alone: Callable[[], None] | None = None
    ) -> Work:
        """Have a collective done: here, if the caller waits for it anyway, else by the group's thread.

        `alone`: what is done in place of it by a group that has no connections.
        """
        connections = self._connections
        connections.check()
        self._begun += 1
        what = f"{kind} number {self._begun} of group '{connections.name}'"
        mesh = connections.mesh
        if mesh is None:
            if alone is not None:
                alone()
            return finished(what, list(results))
        seconds = self._seconds(opts)
        work = Work(what, list(results), connections.line.help_along)
        add = connections.line.add if getattr(opts, "asyncOp", True) else connections.line.do_here
        add(work, lambda: carry_out(mesh, what, do, seconds))
        return work

    def _seconds(self, opts: Any) -> float:
        """How long a collective may take: as it says itself, else as its group says."""
        given: timedelta | None = getattr(opts, "timeout", None)
        own = given.total_seconds() if given is not None else 0.0
        return own if own > 0 else self.options._timeout.total_seconds()

    def _send_or_receive(self, kind: str, tensor: torch.Tensor, begin: Callable[[Messages, Wish], None]) -> Work:
        """Have a message sent or received. A group that has no connections does nothing."""
        connections = self._connections
        connections.check()
        work = Work(f"{kind} in group '{connections.name}'", [tensor])
        messages = connections.messages
        if messages is None:
            work.end()
        else:
            written = Written([tensor])
            begin(messages, Wish(work, written.parts[0], time.monotonic() + self._seconds(None), written.put_back))
        return work

    # ------------------------------------------------------------ what torch asks

    def name(self) -> str:
        return NAME

    # The next five are called by C++, by these names. It keeps a group's name in its backends, and here are none.

    def getBackendName(self) -> str:
        return NAME

    def getGroupName(self) -> str:
        return self._names["name"]

    def setGroupName(self, name: str) -> None:
        self._names["name"] = name

    def getGroupDesc(self) -> str:
        return self._names["description"]

    def setGroupDesc(self, description: str) -> None:
        self._names["description"] = description

    def _get_backend_name(self) -> str:
        return NAME

    @property
    def _device_types(self) -> list[torch.device]:
        return [CPU]

    def _get_backend(self, device: torch.device) -> Any:
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"No backend type associated with device type {device}")
        return self

    def supports_tensor_alloc(self, _device: object) -> bool:
        return False

    def get_group_store(self) -> Any:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives were begun since the group was made."""
        return self._begun

    def _set_sequence_number_for_group(self) -> None:
        """All ranks count from 0."""


def carry_out(mesh: Mesh, what: str, do: Do, seconds: float) -> Exception | None:
    """Do a collective. A mesh in which one has failed is broken: nobody knows what the others have got."""
    try:
        mesh.check()
        do(mesh, time.monotonic() + seconds)
    except Broken as error:
        return error
    except TimeoutError as error:
        return _broken(mesh, f"{what} has taken longer than {seconds:g} s: {error}")
    except Exception as error:  # noqa: BLE001  whatever it is, it belongs to who waits
        return _broken(mesh, f"{what}: {error}")
    except BaseException:
        mesh.break_off(f"{what} was interrupted")
        raise
    return None


def _broken(mesh: Mesh, why: str) -> Broken:
    mesh.break_off(why)
    try:
        mesh.check()
    except Broken as error:
        return error
    raise AssertionError("a mesh that was broken is not")


# ---------------------------------------------------------------- what it communicates with

# Its mesh, its messages, and the line of its collectives; replaced at each meeting.
#
# They outlive the group object for as long as a thread of theirs lives, and hold no reference to it.

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
