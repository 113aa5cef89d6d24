"""Asking: one HTTP request over a plain socket: http.client takes longer to import than all else that a verb needs."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from urllib.parse import urlsplit

HEAD_END = b"\r\n\r\n"
PIECE = 1 << 16


class NoAnswer(ConnectionError):
    """Nobody is there, or what came back is no whole answer."""


def ask(
    url: str, method: str, path: str, headers: Mapping[str, str], body: bytes, timeout_s: float, inside: str = ""
) -> tuple[int, bytes]:
    """The status and the body of the answer. Raises `NoAnswer`, or OSError, if there is none.

    `inside`: a unix socket that leads to the same; where nobody listens on it, the URL is asked.

    HTTP/1.0: the server closes the connection after its answer, and does not cut it into chunks.
    """
    where = urlsplit(url)
    if where.hostname is None or where.scheme != "http":
        raise NoAnswer(f"{url!r} is no http URL")
    lines = [f"{method} {path} HTTP/1.0", f"Host: {where.netloc}", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if any(control in line for line in lines for control in "\r\n"):
        raise NoAnswer("a line break in a header")
    with connect(where.hostname, where.port or 80, timeout_s, inside) as connection:
        connection.sendall("\r\n".join(lines).encode("latin-1", "replace") + HEAD_END + body)
        pieces = []
        while piece := connection.recv(PIECE):
            pieces.append(piece)
    return read_answer(b"".join(pieces))


def connect(host: str, port: int, timeout_s: float, inside: str) -> socket.socket:
    """A connection to the unix socket, if there is one, else to the port. Raises OSError."""
    if inside:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout_s)
        try:
            connection.connect(inside)
            return connection
        except (FileNotFoundError, ConnectionRefusedError, PermissionError):
            connection.close()  # it was removed with its run, or is another's
        except OSError:
            connection.close()
            raise
    return socket.create_connection((host, port), timeout_s)


def read_answer(data: bytes) -> tuple[int, bytes]:
    """Take an answer apart. Raises `NoAnswer` if it is cut off, or no answer of HTTP."""
    head, end, body = data.partition(HEAD_END)
    first, *rest = head.decode("latin-1").split("\r\n")
    words = first.split(" ", 2)
    if not end or len(words) < 2 or not words[0].startswith("HTTP/") or not words[1].isdecimal():
        raise NoAnswer(f"not an answer: {first[:80]!r}")
    for line in rest:
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-length" and value.strip() != str(len(body)):
            raise NoAnswer(f"the answer was cut off after {len(body)} of {value.strip()} bytes")
    return int(words[1]), body
