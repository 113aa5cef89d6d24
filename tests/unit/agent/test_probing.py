"""Probing: whatever answers shows that the way is there, and nothing else does."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys

import pytest

from tests.support.probing import deaf, free_port
from torchrelay.agent.network.network import carries
from torchrelay.agent.network.paths import reaches

NEAR, FAR = "127.0.93.1", "127.0.93.2"


def probe(local: str, remote: str, port: int, interface: str = "") -> bool:
    return asyncio.run(reaches(local, remote, port, interface, within_s=0.5))


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
    ("local", "remote"),
    [
        ("192.0.2.1", FAR), ("no address", FAR), (NEAR, "no address"), (NEAR, "::1"), ("::1", FAR), (NEAR, ".."),
        (NEAR, "a" * 64), (NEAR, "localhost"),
    ],
)  # fmt: skip
def test_what_cannot_be_reached_from_there_is_not(local: str, remote: str) -> None:
    assert not probe(local, remote, 9)


def test_it_leaves_by_the_interface_only() -> None:
    port = free_port(FAR)
    assert probe(NEAR, FAR, port, "lo")
    assert not probe(NEAR, FAR, port, "no-such-if")


@pytest.mark.parametrize(
    ("name", "up"), [("lo", True), ("no-such-if", False), ("../../etc", False), ("a" * 16, False), ("", False)]
)
def test_whether_an_interface_is_up_is_the_kernels_word(name: str, up: bool) -> None:
    assert carries(name) is up


def test_it_is_asked_of_the_interfaces_that_we_have_ourselves() -> None:
    # Not those of /sys, which are those of whoever has mounted it: in a network of its own an agent has others.
    ask = "from torchrelay.agent.network.network import carries; print(carries('lo'))"
    done = subprocess.run(
        ["unshare", "-Urn", sys.executable, "-c", ask], capture_output=True, text=True, timeout=60, check=False
    )
    if "unshare" in done.stderr:
        pytest.skip(done.stderr)
    assert done.stdout == "False\n", f"it is new, and so it is down {done.stderr}"
