"""Sockets of this process: which belong to our communicators, and how to break them from another thread.

A blocked Gloo collective cannot be aborted, but its connections can be shut down under it: the waiter then fails at
once, unless a message was half transferred. Gloo has taken such a message out of its lists, fails all that is in them,
and whoever waits for that one message waits until its timeout, half an hour by default (`Pair::signalException` in
gloo/transport/tcp/pair.cc). So what flows is let flow: between two that live it comes to rest by itself.

Ours are told from the script's by their addresses: every device of ours and of our peers listens at an address
that we know. A descriptor's number may be used again for something else at any time, so a socket is judged and touched
only through a duplicate of our own.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import re
import select
import socket
import stat
import struct
import termios
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

Address = tuple[str, int]

LOOK_S = 0.01  # between two looks at what has flowed
FLOW_S = 2.0  # how long a connection may flow after the first attempt to break it
ATTEMPT_S = 1.0  # attempts closer together than this are one
_TCP_INFO = struct.Struct("=120xQQ")  # of linux/tcp.h: bytes acknowledged by the other side, bytes received from it


class Ends(NamedTuple):
    """Where a TCP socket is bound, and whom it is connected to (None: it listens, or is not connected)."""

    local: Address
    peer: Address | None
    listens: bool


class Flow(NamedTuple):
    """How many bytes the other side has taken and sent, and how many of these nobody here has read yet."""

    sent: int
    received: int
    unread: int


@dataclass(frozen=True)
class OpenSocket:
    """A TCP socket of this process: its descriptor's number, its inode, its ends, and a handle that closes with us."""

    descriptor: int
    inode: int
    ends: Ends
    handle: socket.socket

    def flow(self) -> Flow | None:
        """What has flowed so far; None where the system does not say."""
        try:
            sent, received = _TCP_INFO.unpack(
                self.handle.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            )
            (unread,) = struct.unpack("i", fcntl.ioctl(self.handle, termios.FIONREAD, b"\0" * 4))
        except (OSError, struct.error):
            return None
        return Flow(sent, received, unread)

    def shut_down(self) -> bool:
        """Shut it down in both directions. False if it was not connected any more."""
        try:
            self.handle.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
        return True


def open_sockets() -> Iterator[OpenSocket]:
    """The TCP sockets of this process. Each handle is closed when the next is asked for; the original stays open."""
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            copy = os.dup(descriptor)
        except OSError:  # closed since, like the listing's own descriptor
            continue
        try:
            handle = socket.socket(fileno=copy)
        except OSError:  # became something else since
            os.close(copy)
            continue
        with handle:
            ends = _ends_of(handle)
            if ends is not None:
                yield OpenSocket(descriptor, os.fstat(copy).st_ino, ends, handle)


def _ends_of(handle: socket.socket) -> Ends | None:
    if handle.family not in (socket.AF_INET, socket.AF_INET6) or handle.type != socket.SOCK_STREAM:
        return None
    try:
        local = plain_address(handle.getsockname())
        listens = bool(handle.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return None
    try:
        return Ends(local, plain_address(handle.getpeername()), listens)
    except OSError:  # listening, or reset by the other side
        return Ends(local, None, listens)


def plain_address(name: tuple[str, int]) -> Address:
    """Host and port; an IPv4 address that came as IPv6 is written as IPv4, so that both ends spell it the same."""
    return name[0].removeprefix("::ffff:"), name[1]


def listening_addresses() -> frozenset[Address]:
    """Where this process listens."""
    return frozenset(sock.ends.local for sock in open_sockets() if sock.ends.listens)


class Ours:
    """The addresses by which our own sockets are known.

    devices   where our Gloo devices listen: what is bound there is a connection that a peer made to us
    peers     where our peers' devices listen: what is connected there is a connection that we made
    store     the store in use: what is connected there is our client
    hosted    the stores that this process serves: hidden from forked children, never broken

    Sets are replaced, never changed, so that any thread may read them without a lock, and a forked child, too.
    """

    def __init__(self) -> None:
        self.devices: frozenset[Address] = frozenset()
        self.peers: frozenset[Address] = frozenset()
        self.store: Address | None = None
        self.hosted: frozenset[Address] = frozenset()
        self._first_s = self._last_s = float("-inf")  # of the attempts to break what flows

    def add_devices(self, addresses: Iterable[Address]) -> None:
        self.devices |= frozenset(addresses)

    def add_peers(self, addresses: Iterable[Address]) -> None:
        self.peers |= frozenset(addresses)

    def is_connection(self, ends: Ends) -> bool:
        """Whether this is a connection of a backend of ours."""
        if ends.listens:
            return False  # shutting a listener down ends the process, from a thread of Gloo's
        return ends.local in self.devices or (ends.peer is not None and ends.peer in self.peers)

    def is_client_of_store(self, ends: Ends) -> bool:
        """Whether this is our client of the store in use."""
        return ends.peer is not None and ends.peer == self.store

    def break_backends(self) -> int:
        """Shut down the connections of our backends, whatever flows. Returns how many were still connected."""
        return sum(sock.shut_down() for sock in open_sockets() if self.is_connection(sock.ends))

    def break_still(self) -> int:
        """Shut down those of our backends' connections that are at rest; after `FLOW_S` of attempts, all of them.

        Takes `LOOK_S` if there are any. Returns how many were still connected, and are not any more.
        """
        now = time.monotonic()
        if now - self._last_s > ATTEMPT_S:
            self._first_s = now
        self._last_s = now
        if now - self._first_s > FLOW_S:
            return self.break_backends()
        before = self._flows()
        if not before:
            return 0
        time.sleep(LOOK_S)
        broken = 0
        for sock in open_sockets():
            if self.is_connection(sock.ends):
                flow = sock.flow()
                rests = flow is None or (flow.unread == 0 and before.get(sock.inode) == flow)
                broken += rests and sock.shut_down()
        return broken

    def _flows(self) -> dict[int, Flow | None]:
        return {sock.inode: sock.flow() for sock in open_sockets() if self.is_connection(sock.ends)}

    def silence(self) -> int:
        """What Gloo was left with of generations that are over keeps no thread of it busy any more.

        To be called when nobody waits for them. Connections that still are ones are left alone. See `silence`.
        """
        return silence({sock.inode for sock in open_sockets() if self._is_device(sock.ends)})

    def _is_device(self, ends: Ends) -> bool:
        return ends.listens and ends.local in self.devices

    def break_store(self) -> int:
        """Shut down our client of the store. Returns whether it was still connected."""
        return sum(sock.shut_down() for sock in open_sockets() if self.is_client_of_store(sock.ends))

    def cover(self) -> int:
        """In a forked child: put /dev/null over our sockets, so that peers see them close when their rank ends.

        Returns how many were covered.
        """
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        covered = 0
        served = self.devices | self.hosted
        for sock in open_sockets():
            ends = sock.ends
            if ends.local in served or self.is_connection(ends) or self.is_client_of_store(ends):
                os.dup2(null, sock.descriptor, inheritable=False)
                covered += 1
        os.close(null)
        return covered


# ---------------------------------------------------------------- what would wake Gloo's threads for ever

# A connection whose message is half transferred stays in its loop when the buffer of the message is gone: Gloo then
# neither reads nor writes, nor closes it (`Pair::prepareRead` and `Pair::write` in gloo/transport/tcp/pair.cc), and
# epoll reports it again at once. So a survivor of a fault, whose call was cut short in the middle of a transfer, would
# have a thread at full load as long as the old backend is kept, which may be for the life of the process.
#
# What has ended is therefore reported once more at most (EPOLLONESHOT). It is not taken out of the loop: Gloo ends the
# process if it finds a connection missing there when it closes it. Nor may Gloo be told that it can write: it ends the
# process if it has nothing left to write by then. A connection that still is one is left alone, as a message may be
# under way on it.

_EPOLL_CTL_MOD = 3  # of sys/epoll.h, as is the layout of an event: packed on x86-64 alone
_EVENT = struct.Struct("=IQ" if platform.machine() == "x86_64" else "=I4xQ")
_ENTRY = re.compile(r"tfd:\s*(\d+)\s+events:\s*([0-9a-f]+)\s+data:\s*([0-9a-f]+).*?\sino:([0-9a-f]+)")
_UNDER_WAY = (1, 2, 3, 10)  # of net/tcp_states.h: established, two while connecting, and listening
_LIBC = ctypes.CDLL(None, use_errno=True)


class Watched(NamedTuple):
    """A descriptor that an epoll instance watches: for which events, its inode, and what the events carry."""

    descriptor: int
    inode: int
    events: int
    data: int


def epolls() -> list[int]:
    """The descriptors of the epoll instances of this process."""
    return [descriptor for descriptor in map(int, os.listdir("/proc/self/fd")) if _is_epoll(descriptor)]


def _is_epoll(descriptor: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}") == "anon_inode:[eventpoll]"
    except OSError:  # closed since
        return False


def watched(epoll: int) -> Iterator[Watched]:
    """What an epoll instance watches; nothing where the system does not say."""
    try:
        with open(f"/proc/self/fdinfo/{epoll}", encoding="ascii") as file:
            text = file.read()
    except OSError:  # closed since
        return
    for descriptor, events, data, inode in _ENTRY.findall(text):
        yield Watched(int(descriptor), int(inode, 16), int(events, 16), int(data, 16))


def silence(listeners: Collection[int]) -> int:
    """Let each connection that has ended be reported once more at most, in the loops of these listening sockets.

    `listeners`: inodes of Gloo's own devices, by which their loops are known. To be called when nobody waits for what
    was on these connections. Returns how many could still be reported.
    """
    silenced = 0
    for epoll in epolls():
        entries = list(watched(epoll))
        if any(entry.inode in listeners for entry in entries):
            silenced += sum(_once_more(epoll, entry) for entry in entries if entry.inode not in listeners)
    return silenced


def _once_more(epoll: int, entry: Watched) -> bool:
    """False if it has been closed since, is still connected, will not be reported, or is the pipe that wakes Gloo."""
    if not entry.events & (select.EPOLLIN | select.EPOLLOUT) or not _has_ended(entry):
        return False
    event = _EVENT.pack(select.EPOLLIN | select.EPOLLONESHOT, entry.data)
    return bool(_LIBC.epoll_ctl(epoll, _EPOLL_CTL_MOD, entry.descriptor, event) == 0)


def _has_ended(entry: Watched) -> bool:
    """Whether it is a TCP socket that was connected, and that one of both sides has shut down."""
    try:
        copy = os.dup(entry.descriptor)
    except OSError:  # closed since
        return False
    try:
        handle = socket.socket(fileno=copy)
    except OSError:  # a pipe
        os.close(copy)
        return False
    with handle:
        if os.fstat(copy).st_ino != entry.inode:
            return False
        try:
            return handle.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] not in _UNDER_WAY
        except OSError:  # no TCP
            return False
