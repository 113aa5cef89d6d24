"""Our own connections are found among all sockets of a process, and nobody else's."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator

import pytest

from torchrelay.worker.process_groups.sockets import Ours, open_sockets


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket, socket.socket]]:
    """A listener, and both ends of a connection to it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with socket.create_connection(listener.getsockname()) as here, listener.accept()[0] as there:
            yield listener, here, there


def is_open(end: socket.socket) -> bool:
    end.setblocking(False)
    try:
        return end.recv(1) != b""
    except BlockingIOError:
        return True


def test_a_connection_is_known_by_where_it_was_accepted(
    connection: tuple[socket.socket, socket.socket, socket.socket],
) -> None:
    listener, here, there = connection
    ours = Ours()
    ours.add_devices([listener.getsockname()])
    assert ours.break_backends() == 1
    assert not is_open(here)
    assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    with socket.create_connection(listener.getsockname()):
        pass  # the listener listens on
    assert not is_open(there)


def test_a_connection_is_known_by_whom_it_was_made_to(
    connection: tuple[socket.socket, socket.socket, socket.socket],
) -> None:
    listener, _, there = connection
    ours = Ours()
    ours.peers = frozenset([listener.getsockname()])
    assert ours.break_backends() == 1
    assert not is_open(there)


def test_a_connection_to_another_address_is_a_strangers(
    connection: tuple[socket.socket, socket.socket, socket.socket],
) -> None:
    listener, here, there = connection
    ours = Ours()
    ours.peers = frozenset([("127.0.0.1", 1)])
    ours.store = ("127.0.0.1", 2)
    ours.hosted = frozenset([listener.getsockname()])  # a hosted store's clients are other ranks' business
    assert ours.break_backends() == ours.break_store() == 0
    assert is_open(here)
    assert is_open(there)


def shut(end: socket.socket) -> bool:
    """Whether our end was shut down here."""
    try:
        end.send(b"")
        end.getpeername()
        end.send(b"x")
    except OSError:
        return True
    return False


def test_what_flows_is_let_flow_and_what_rests_is_broken(
    connection: tuple[socket.socket, socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, here, there = connection
    ours = Ours()
    ours.peers = frozenset([listener.getsockname()])
    monkeypatch.setattr(time, "sleep", lambda _: there.send(b"more"))
    assert ours.break_still() == 0, "it flowed between two looks"
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert ours.break_still() == 0, "nobody has read it yet"
    assert here.recv(8) == b"more"
    monkeypatch.setattr(time, "sleep", lambda _: here.send(b"on"))
    assert ours.break_still() == 0
    assert there.recv(8) == b"on"
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert not shut(here)
    there.recv(8)
    assert ours.break_still() == 1
    assert shut(here)


def test_what_flows_for_too_long_is_broken_all_the_same(
    connection: tuple[socket.socket, socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, here, there = connection
    ours = Ours()
    ours.peers = frozenset([listener.getsockname()])
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "sleep", lambda _: there.send(b"more"))
    for moment in (100.0, 100.9, 103.0, 103.9, 104.8):  # between the second and the third it was left alone
        now = moment
        assert ours.break_still() == 0
    now = 105.1
    assert ours.break_still() == 1
    assert shut(here)


@pytest.mark.parametrize(
    ("known_as", "covered"),
    [("devices", 2), ("hosted", 2), ("peers", 1), ("store", 1), ("", 0)],  # the listener and what it accepted; our end
)
def test_a_child_covers_our_sockets_and_no_others(
    connection: tuple[socket.socket, socket.socket, socket.socket], known_as: str, covered: int
) -> None:
    listener, here, there = connection
    ours = Ours()
    address = listener.getsockname()
    if known_as:
        setattr(ours, known_as, address if known_as == "store" else frozenset([address]))
    child = os.fork()
    if child == 0:
        os._exit(ours.cover())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == covered
    assert is_open(here)  # the parent's are untouched
    assert is_open(there)


def test_looking_at_sockets_leaves_no_descriptor_behind(
    connection: tuple[socket.socket, socket.socket, socket.socket],
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    _, here, _ = connection
    assert here.getsockname() in [sock.ends.local for sock in open_sockets()]
    assert len(os.listdir("/proc/self/fd")) == before
