"""Output: a worker says in its own output which rank it is from there on, so that no line comes out of turn.

Whoever forks a worker opens the channel in it; without one (a worker that was started by other means) nothing is said.
"""

from __future__ import annotations

import os

_channel: tuple[int, bytes] | None = None


def open_channel(descriptor: int, key: bytes) -> None:
    """In a worker: a descriptor of its output that scripts do not know, and what only the reader of it knows."""
    global _channel
    _channel = descriptor, key


def announce(rank: int) -> bool:
    """What is written from now on is this rank's. False if there is no channel."""
    global _channel
    channel, _channel = _channel, None
    if channel is None:
        return False
    descriptor, key = channel
    said = mark(key, rank)  # short enough to be in one piece, whatever else is written
    try:
        os.write(descriptor, said)
        os.close(descriptor)
    except OSError:  # the script has closed whatever it did not know
        os.write(1, said)
    return True


def mark(key: bytes, rank: int) -> bytes:
    """What stands in the output in that place."""
    return key + b"%d\n" % rank
