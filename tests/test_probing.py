"""Probing: whatever answers shows that the way is there, and nothing else does."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from torchrelay.agent.network import carries
from torchrelay.agent.probing import reaches

NEAR, FAR = "127.0.93.1", "127.0.93.2"


def probe(local: str, remote: str, port: int, interface: str = "") -> bool:
    return asyncio.run(reaches(local, remote, port, interface, within_s=0.5))


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


def test_a_refusal_is_an_answer() -> None:
    assert probe(NEAR, FAR, free_port(FAR))


def test_a_connection_is_an_answer() -> None:
    with socket.socket() as listener:
        listener.bind((FAR, 0))
        listener.listen()
        assert probe(NEAR, FAR, listener.getsockname()[1])


def test_silence_is_none() -> None:
    port = free_port(FAR)
    with deaf(FAR, port):
        assert not probe(NEAR, FAR, port)
    assert probe(NEAR, FAR, port)


@pytest.mark.parametrize(
    ("local", "remote"), [("192.0.2.1", FAR), ("no address", FAR), (NEAR, "no address"), (NEAR, "::1"), ("::1", FAR)]
)
def test_what_cannot_be_reached_from_there_is_not(local: str, remote: str) -> None:
    assert not probe(local, remote, 9)


def test_it_leaves_by_the_interface_only() -> None:
    port = free_port(FAR)
    assert probe(NEAR, FAR, port, "lo")
    assert not probe(NEAR, FAR, port, "no-such-if")


def test_whether_an_interface_is_up_is_the_kernels_word(tmp_path: Path) -> None:
    assert carries("lo")
    assert not carries("no-such-if")
    assert carries("eth0", tmp_path / "nowhere"), "without /sys nothing is known against it"
    assert not carries("../../etc")
    (tmp_path / "eth0").mkdir()
    assert not carries("eth0", tmp_path)
    for text, up in (("1\n", True), ("0\n", False)):
        (tmp_path / "eth0" / "carrier").write_text(text)
        assert carries("eth0", tmp_path) is up
