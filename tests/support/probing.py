"""What tests of probing share."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


def free_port(host: str) -> int:
    with socket.socket() as found:
        found.bind((host, 0))
        port: int = found.getsockname()[1]
        return port


@contextmanager
def deaf(host: str, port: int) -> Iterator[None]:
    """A port that answers nothing: its queue of connections is full, so the kernel drops what comes."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(0)
        waiting = []
        try:
            for _ in range(20):
                caller = socket.socket()
                waiting.append(caller)
                caller.settimeout(0.2)
                try:
                    caller.connect((host, port))
                except TimeoutError:
                    break
            else:
                raise AssertionError("the queue is never full")
            yield
        finally:
            for caller in waiting:
                caller.close()
