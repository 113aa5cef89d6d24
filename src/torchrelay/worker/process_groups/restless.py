"""Restless: what Gloo's threads wait for, and would be woken by for ever.

A connection whose message is half transferred stays in its loop when the buffer of the message is gone: Gloo then
neither reads nor writes, nor closes it (`Pair::prepareRead` and `Pair::write` in gloo/transport/tcp/pair.cc), and
epoll reports it again at once. So a survivor of a fault, whose call was cut short in the middle of a transfer, would
have a thread at full load as long as the old backend is kept, which may be for the life of the process.

What has ended is therefore reported once more at most (EPOLLONESHOT). It is not taken out of the loop: Gloo ends the
process if it finds a connection missing there when it closes it. Nor may Gloo be told that it can write: it ends the
process if it has nothing left to write by then. A connection that still is one is left alone, as a message may be under
way on it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import select
import socket
import struct
from collections.abc import Collection, Iterator
from typing import NamedTuple

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
