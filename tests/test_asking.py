"""The client's own HTTP: an answer is whole, or it is none."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from torchrelay.client.asking import NoAnswer, ask, read_answer
from torchrelay.client.client import Away, Client, Denied


class Once:
    """A server that says the same to whoever connects, and keeps what it was asked."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.says = b""
        self.asked = b""
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with closing(connection):
                self.asked = connection.recv(65_536)
                connection.sendall(self.says)


@pytest.fixture
def server() -> Iterator[Once]:
    once = Once()
    yield once
    once.listener.close()


def test_a_whole_answer_is_taken_apart(server: Once) -> None:
    server.says = b"HTTP/1.0 202 Accepted\r\nContent-Length: 2\r\nX: y\r\n\r\n{}"
    assert ask(server.url, "POST", "/v1/x", {"Authorization": "Bearer t"}, b"body", 5.0) == (202, b"{}")
    assert server.asked.startswith(b"POST /v1/x HTTP/1.0\r\nHost: 127.0.0.1")
    assert b"Authorization: Bearer t\r\n" in server.asked
    assert server.asked.endswith(b"Content-Length: 4\r\nAuthorization: Bearer t\r\n\r\nbody")


@pytest.mark.parametrize(
    "data",
    [
        b"", b"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\n{}", b"HTTP/1.0 200 OK\r\nContent-Le",
        b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.0 abc\r\n\r\n",
    ],
)  # fmt: skip
def test_what_is_cut_off_or_something_else_is_no_answer(server: Once, data: bytes) -> None:
    with pytest.raises(NoAnswer):
        read_answer(data)
    server.says = data
    with pytest.raises(Away, match="no orchestrator answers at"):
        Client(server.url, "trt_x").status()


def test_a_refusal_is_told_in_the_orchestrators_words(server: Once) -> None:
    server.says = b'HTTP/1.0 404 Not Found\r\n\r\n{"error": "no job named x"}'
    with pytest.raises(Denied, match=r"^no job named x$") as caught:
        Client(server.url, "trt_x").status()
    assert caught.value.status == 404


@pytest.mark.parametrize("url", ["", "nonsense", "https://127.0.0.1:1", "http://127.0.0.1:1"])
def test_where_nobody_can_be_asked_nobody_answers(url: str) -> None:
    with pytest.raises(OSError):
        ask(url, "GET", "/", {}, b"", 1.0)


def test_a_line_break_makes_no_header(server: Once) -> None:
    with pytest.raises(NoAnswer, match="line break"):
        ask(server.url, "GET", "/", {"X": "a\r\nY: b"}, b"", 1.0)
