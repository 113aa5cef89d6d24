"""What tests let puppets do with the library of the network part, below all groups."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from tests.scripts.groups_ranks import Actions, until
from torchrelay.netpath.native import binding
from torchrelay.wire.messages.netreport import NetPage, pages_in, read_page


def attempts_to_connect(_a: Actions) -> tuple[int, int]:
    """How often a listener that never answers is called before and after the attempt is given up."""
    with socket.create_server(("127.0.1.1", 0)) as silent:
        port = silent.getsockname()[1]
        handle = struct.pack("<IBBxx16s", 0x484E5254, 1, 1, bytes(16))
        connecting = binding.Connecting(handle + struct.pack("!BxH4s", 4, port, socket.inet_aton("127.0.1.1")), 1)
        calls = [0, 0]
        for given_up in range(2):
            silent.settimeout(5.0 if not given_up else 1.5)
            with suppress(TimeoutError):
                while calls[given_up] < 3:
                    assert connecting.poll() is None if not given_up else True
                    silent.accept()[0].close()
                    calls[given_up] += 1
            connecting.give_up()
    return calls[0], calls[1]


def bad_words(_a: Actions) -> list[str]:
    """What is said of what cannot be meant."""
    said = []
    for attempt in (
        lambda: binding.Connecting(b"no handle", 1).poll(),
        lambda: binding.inject("path0:melt@0s"),
        lambda: binding.inject("path9:drop@0s"),
    ):
        try:
            attempt()
        except binding.NetError as error:
            said.append(f"{error.code}: {error}")
    return said


def start(_a: Actions) -> str:
    return binding.start().version()


def two_ends() -> tuple[binding.Comm, binding.Comm]:
    """A comm of this process with itself: who sends, and who receives."""
    listener = binding.Listener()
    connecting = binding.Connecting(listener.handle, 1)
    sender = receiver = None
    deadline = time.monotonic() + 10
    while sender is None or receiver is None:
        assert time.monotonic() < deadline, "they do not connect"
        sender, receiver = sender or connecting.poll(), receiver or listener.accept(1)
    listener.close()
    return sender, receiver


def closed_while_waiting(_a: Actions) -> str:
    """What who waits for a message is told when another thread closes the comm."""
    sender, receiver = two_ends()
    room = ctypes.create_string_buffer(8)
    request = receiver.irecv(ctypes.addressof(room), 8)
    assert request is not None
    told: list[object] = []
    begins = threading.Event()

    def wait() -> None:
        done, size = ctypes.c_int(), ctypes.c_size_t()
        begins.set()
        code = request._library.free.np_wait(request._pointer, 10_000, done, size)
        told.append(f"{code}: {request._library.error()}" if code else f"done: {done.value}, {size.value} bytes")

    waiting = threading.Thread(target=wait)
    waiting.start()
    begins.wait()
    until(lambda: sleeps(waiting))
    receiver.close()
    waiting.join(10)
    sender.close()
    return str(told[0])


def sleeps(thread: threading.Thread) -> bool:
    state = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()[0]
    return state == "S"


PEERS = """
import os, sys, time
from torchrelay.netpath.native import binding
for number in range(1, int(sys.argv[2]) + 1):
    os.environ["TORCHRELAY_NET_PATHS"] = f"127.0.3.{number}"
    library = binding.load()
    assert library.free.np_start(None) == 0, library.error()
    binding._engine._process = os.getpid()
    connecting = binding.Connecting(bytes.fromhex(sys.argv[1]), 1)
    while (comm := connecting.poll()) is None:
        time.sleep(0.001)
    comm.close()
    library.free.np_stop()
os._exit(0)
"""


def peers_one_by_one(_a: Actions, count: int) -> list[str]:
    """The remote addresses that the page of figures shows when so many peers have come and gone."""
    listener = binding.Listener()
    words = [sys.executable, "-c", PEERS, listener.handle.hex(), str(count)]
    with subprocess.Popen(words, env=os.environ | {"TORCHRELAY_NET_STATS": ""}) as peers:

        def gone() -> bool:
            while (comm := listener.accept(1)) is not None:
                comm.close()
            return peers.poll() is not None

        until(gone)
    assert peers.returncode == 0
    ((_, at),) = pages_in(Path(os.environ["TORCHRELAY_NET_STATS"]))
    since_us = time.time_ns() // 1000

    def page() -> NetPage:
        found = read_page(at)
        assert found is not None
        return found

    until(lambda: page().updated_us > since_us)
    return [row.remote for row in page().rows]


def path_too_many(_a: Actions) -> tuple[int, bool]:
    """What is answered to who knows the token and greets for a fifth path, and whether a comm has been made of that."""
    listener = binding.Listener()
    token = listener.handle[8:24]
    family, port, address = struct.unpack_from("!BxH4s", listener.handle, 24)
    assert family == 4
    words = struct.pack("<IBBHQIIII", 0x004E5254 | 1 << 24, 1, 4, 1, 4711, 0, 32, 0, 0) + token
    with socket.create_connection((socket.inet_ntoa(address), port), timeout=10) as stranger:
        stranger.sendall(words + struct.pack("<II8x", 256 << 10, 0))
        answer = stranger.recv(32, socket.MSG_WAITALL)
    made = listener.accept(1)
    listener.close()
    return answer[4], made is not None
