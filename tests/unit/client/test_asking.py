"""The client's HTTP: an answer is whole, or it is none; the unix socket comes first; no error quotes the token."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from torchrelay.client.asking import NoAnswer, ask
from torchrelay.client.client import Away, Client, Denied


class Once:
    """A server that says the same to whoever connects, and keeps what it was asked."""

    def __init__(self, listener: socket.socket | None = None) -> None:
        self.listener = listener or socket.create_server(("127.0.0.1", 0))
        self.listener.listen()
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
                self.asked = request_from(connection)
                connection.sendall(self.says)


def request_from(connection: socket.socket) -> bytes:
    """A request with its body, which may come apart from its head."""
    asked = b""
    while piece := connection.recv(65_536):
        asked += piece
        head, end, body = asked.partition(b"\r\n\r\n")
        length = re.search(rb"Content-Length: (\d+)", head)
        if end and len(body) >= (0 if length is None else int(length[1])):
            break
    return asked


@pytest.fixture
def server() -> Iterator[Once]:
    once = Once()
    yield once
    once.listener.close()


def test_a_whole_answer_is_taken_apart(server: Once) -> None:
    server.says = b"HTTP/1.0 202 Accepted\r\nContent-Length: 2\r\nX: y\r\n\r\n{}"
    assert ask(server.url, "POST", "/v1/x", {"Authorization": "Bearer t"}, b"body", 5.0) == (202, b"{}")
    head, _, body = server.asked.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/x HTTP/1.1\r\nHost: 127.0.0.1")
    for line in (b"Authorization: Bearer t", b"Content-Length: 4", b"Connection: close"):
        assert line in head.split(b"\r\n")
    assert body == b"body"


def test_an_answer_in_chunks_is_put_together(server: Once) -> None:
    server.says = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n1\r\n \r\n0\r\n\r\n"
    assert ask(server.url, "GET", "/", {}, b"", 5.0) == (200, b"{} ")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not an answer"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\n{}", "cut off after 2 of 9 bytes"),
        (b"HTTP/1.0 200 OK\r\nContent-Le", "cut off in its head"),
        (b"HTTP/1.0 200 OK\r\n", "cut off in its head"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n{}", "cut off after"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "not an answer: 'SSH-2.0-OpenSSH'"),
        (b"HTTP/1.0 abc\r\n\r\n", "not an answer: 'HTTP/1.0 abc'"),
        (b"x" * 70_000, "not an answer"),
        (b"HTTP/1.0 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n", "not an answer"),
    ],
)
def test_what_is_cut_off_or_something_else_is_no_answer(server: Once, data: bytes, said: str) -> None:
    server.says = data
    with pytest.raises(NoAnswer, match=said):
        ask(server.url, "GET", "/", {}, b"", 5.0)
    with pytest.raises(Away, match="no orchestrator answers at"):
        Client(server.url, "trt_x").status()


def test_a_server_that_says_nothing_is_not_waited_for_longer_than_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begun = time.monotonic()
        with pytest.raises(TimeoutError):
            ask(f"http://127.0.0.1:{silent.getsockname()[1]}", "GET", "/", {}, b"", 0.2)
    assert time.monotonic() - begun < 5


def test_the_unix_socket_is_asked_first_and_the_port_where_it_leads_nowhere(server: Once, tmp_path: Path) -> None:
    server.says = b"HTTP/1.0 200 OK\r\nContent-Length: 4\r\n\r\nport"
    path = str(tmp_path / "inside")
    assert ask(server.url, "GET", "/", {}, b"", 5.0, path) == (200, b"port"), "it is not there"
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(path)
        assert ask(server.url, "GET", "/", {}, b"", 5.0, path) == (200, b"port"), "it accepts no connection"
        inside = Once(listener)
        inside.says = b"HTTP/1.0 200 OK\r\nContent-Length: 6\r\n\r\ninside"
        assert ask(server.url, "GET", "/", {}, b"", 5.0, path) == (200, b"inside")


def test_a_refusal_is_told_in_the_orchestrators_words(server: Once) -> None:
    server.says = b'HTTP/1.0 404 Not Found\r\nContent-Length: 27\r\n\r\n{"error": "no job named x"}'
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
    with pytest.raises(NoAnswer, match="line break"):
        ask(server.url, "GET", "/\r\nX: y", {}, b"", 1.0)


@pytest.mark.parametrize("token", ["secret\nX: y", "secret\0", "secret\u2028"])
def test_no_error_quotes_the_token(server: Once, token: str) -> None:
    with pytest.raises(Away) as caught:
        Client(server.url, token).status()
    seen: BaseException | None = caught.value
    while seen is not None:
        assert "secret" not in str(seen)
        seen = seen.__cause__ or seen.__context__


def test_a_name_that_no_header_can_hold_is_sent_all_the_same(server: Once) -> None:
    server.says = b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n"
    assert ask(server.url, "GET", "/", {"X-Torchrelay-Who": "\u0142ukasz@host"}, b"", 5.0) == (200, b"")
    assert b"X-Torchrelay-Who: ?ukasz@host" in server.asked
