"""What tests let puppets do with the library of the network part, below all groups."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

from tests.scripts.groups_ranks import Actions
from torchrelay.netpath import binding


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
