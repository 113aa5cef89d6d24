"""Counts: what this rank has begun in each of its groups, so that others can tell who waits for whom.

All members of a group begin the same collectives in it, in the same order: who has begun more than another waits for
that one, now or soon. What goes from one rank to another (send, recv) is no business of the group's others. Each such
direction between two ranks is counted apart, as if it were a group of these two: one sends as often as the other
receives. Gloo counts it with the collectives, NCCL does not. Who receives from whoever sends first waits for nobody
that could be named: of such a rank nothing is told.

A count has a key, which is the same on all members: a digest of the group's name and its ranks.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import xxhash
from torch._C._distributed_c10d import ProcessGroup

GLOO = "gloo"
_Send = Callable[..., Any]


class Wired(Protocol):
    """What is to be known of a group: see `backends.Wiring`."""

    @property
    def name(self) -> str: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def rank(self) -> int: ...
    @property
    def kinds(self) -> Mapping[str, tuple[str, ...]]: ...
    @property
    def default(self) -> bool: ...


@dataclass(eq=False)
class _Group:
    """A group of this generation."""

    of: weakref.ref[ProcessGroup]
    key: int
    wiring: Wired
    backends: tuple[Any, ...]  # or the group itself, where it needs none
    aside: int = 0  # what its backends have counted and is no collective

    def begun(self) -> int:
        try:
            numbers = [int(backend._get_sequence_number_for_group()) for backend in self.backends]
        except ReferenceError:  # the script has just destroyed the group
            return 0
        return sum(numbers) - self.aside


@dataclass(eq=False)
class _Channel:
    """From one rank to another, in one group."""

    key: int
    begun: int = 0


class Counts:
    """The counts of this process. Written by the main thread, read by any."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # of the list of groups
        self._groups: tuple[_Group, ...] = ()
        self._default: _Group | None = None
        self._found: weakref.WeakKeyDictionary[ProcessGroup, _Group] = weakref.WeakKeyDictionary()
        self._channels: dict[tuple[str, int, int], _Channel] = {}
        self._from_anybody = False  # it has received so in this generation
        self._watched: set[type] = set()

    def clear(self) -> None:
        """The backends of all groups are about to be let go of: nothing is counted until they have others."""
        with self._lock:
            self._groups, self._default = (), None
            self._found.clear()
            self._channels, self._from_anybody = {}, False

    def add(self, group: ProcessGroup, wiring: Wired, backends: Sequence[Any], *, aside: int = 0) -> None:
        """A group has these backends from now on. `aside`: what they have counted before."""
        self._watch(ProcessGroup if backends and backends[0] is not group else type(group))
        key = key_of(wiring.name, wiring.ranks)
        # The group is its own backend: a reference to it from here would keep it for ever.
        counting = tuple(weakref.proxy(each) if each is group else each for each in backends)
        counted = _Group(weakref.ref(group, self._forget), key, wiring, counting, aside)
        with self._lock:
            self._groups = (*self._groups, counted)
            self._found[group] = counted
            if wiring.default:
                self._default = counted

    def _forget(self, gone: weakref.ref[ProcessGroup]) -> None:
        """The script has destroyed a group. Its backends end in the thread that did: it may have to wait for them."""
        with self._lock:
            self._groups = tuple(group for group in self._groups if group.of is not gone)

    # ------------------------------------------------------------ told

    def default(self) -> int:
        """How many collectives were begun in the default group."""
        group = self._default
        return 0 if group is None else group.begun()

    def others(self) -> list[tuple[int, int]] | None:
        """For each other group, and each direction between two ranks, its key and how much was begun in it.

        In the order in which they were made, or first used. None if it cannot be told.
        """
        if self._from_anybody:
            return None
        with self._lock:  # so that this thread is never the last one to hold a backend
            # Not less than 0, as a message that is about to begin is taken off before Gloo has counted it.
            told = [(group.key, max(0, group.begun())) for group in self._groups if group is not self._default]
        return told + [(channel.key, channel.begun) for channel in tuple(self._channels.values())]

    def key(self, group: ProcessGroup) -> int | None:
        """The key of a group, which is 0 for the default one; None of a group that is not counted."""
        counted = self._found.get(group)
        if counted is None:
            return None
        return 0 if counted.wiring.default else counted.key

    def set_aside(self, number: int) -> None:
        """So many of what the default group counts shall not be; less than 0: so many more. By the main thread alone.

        Forgotten when it gets other backends.
        """
        if self._default is not None:
            self._default.aside += number

    # ------------------------------------------------------------ from one rank to another

    def _watch(self, kind: Any) -> None:
        """Stand in front of this class's functions (torch's are C++): whoever calls them from Python comes by here."""
        if kind in self._watched:
            return
        self._watched.add(kind)
        send, receive, receive_any, barrier = kind.send, kind.recv, kind.recv_anysource, kind.monitored_barrier

        def watched_send(group: ProcessGroup, tensors: list[torch.Tensor], to: int, *more: Any, **named: Any) -> Any:
            self._sent(group, tensors, to, out=True)
            return send(group, tensors, to, *more, **named)

        def watched_recv(group: ProcessGroup, tensors: list[torch.Tensor], by: int, *more: Any, **named: Any) -> Any:
            self._sent(group, tensors, by, out=False)
            return receive(group, tensors, by, *more, **named)

        def watched_recv_any(group: ProcessGroup, tensors: list[torch.Tensor], *more: Any, **named: Any) -> Any:
            self._sent(group, tensors, None, out=False)
            return receive_any(group, tensors, *more, **named)

        def watched_barrier(group: ProcessGroup, *more: Any, **named: Any) -> Any:
            # Inside Gloo it is messages between the first rank and each other one, which so has more of them.
            counted = self._found.get(group)
            before = counted.begun() if counted is not None else 0
            done = barrier(group, *more, **named)
            if counted is not None:
                counted.aside += counted.begun() - before - 1
            return done

        kind.send, kind.recv, kind.recv_anysource = watched_send, watched_recv, watched_recv_any
        kind.monitored_barrier = watched_barrier

    def _sent(self, group: ProcessGroup, tensors: list[torch.Tensor], peer: int | None, *, out: bool) -> None:
        counted = self._found.get(group)
        if counted is None:
            return
        wiring = counted.wiring
        if tensors[0].device.type in wiring.kinds.get(GLOO, ()):
            counted.aside += 1
        if peer is None:
            self._from_anybody = True
            return
        here, there = wiring.ranks[wiring.rank], wiring.ranks[peer]
        way = (wiring.name, here, there) if out else (wiring.name, there, here)
        channel = self._channels.get(way)
        if channel is None:
            channel = self._channels[way] = _Channel(key_of(f"{way[0]} from", way[1:]))
        channel.begun += 1


def key_of(name: str, ranks: Sequence[int]) -> int:
    """64 bits that are equal on all members of a group, and never 0."""
    return xxhash.xxh3_64_intdigest(f"{name}: {','.join(map(str, ranks))}".encode()) or 1
