"""Asking: one HTTP request to an orchestrator, through the run's unix socket or its port."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import closing
from http.client import BadStatusLine, HTTPConnection, HTTPException, HTTPResponse, IncompleteRead
from urllib.parse import urlsplit


class NoAnswer(ConnectionError):
    """The answer is missing, cut off, or not HTTP."""


class Connection(HTTPConnection):
    """Connects to a unix socket, if there is one, else to the port."""

    def __init__(self, host: str, port: int, timeout_s: float, inside: str) -> None:
        super().__init__(host, port, timeout=timeout_s)
        self._inside = inside

    def connect(self) -> None:
        """Raises OSError."""
        if self._inside:
            found = socket.socket(socket.AF_UNIX)
            found.settimeout(self.timeout)
            try:
                found.connect(self._inside)
                self.sock = found
                return
            except (FileNotFoundError, ConnectionRefusedError, PermissionError):
                found.close()  # it was removed with its run, or is another user's
            except OSError:
                found.close()
                raise
        super().connect()


def ask(
    url: str, method: str, path: str, headers: Mapping[str, str], body: bytes, timeout_s: float, inside: str = ""
) -> tuple[int, bytes]:
    """The status and the body of the answer. Raises `NoAnswer`, or OSError, if there is none.

    `inside`: a unix socket that leads to the same; if it does not accept connections, the URL is asked.
    """
    where = urlsplit(url)
    if where.hostname is None or where.scheme != "http":
        raise NoAnswer(f"{url!r} is no http URL")
    # The library would refuse such a line, too, but its error quotes the value, and that may be the token.
    if any(control in text for text in (path, *headers, *headers.values()) for control in "\r\n"):
        raise NoAnswer("a line break in a header")
    # A user's name may hold characters that a header cannot.
    encoded = {name: value.encode("latin-1", "replace") for name, value in headers.items()}
    with closing(Connection(where.hostname, where.port or 80, timeout_s, inside)) as connection:
        try:
            connection.request(method, path, body, {**encoded, "Connection": b"close"})
            return read_answer(connection.getresponse())
        except BadStatusLine as error:
            raise NoAnswer(f"not an answer: {str(error).rstrip()[:80]!r}") from error
        except IncompleteRead as error:
            whole = len(error.partial) + (error.expected or 0)
            raise NoAnswer(f"the answer was cut off after {len(error.partial)} of {whole} bytes") from error
        except HTTPException as error:
            raise NoAnswer(f"not an answer: {error}") from error


def read_answer(answer: HTTPResponse) -> tuple[int, bytes]:
    """An answer that is whole. Raises `NoAnswer`, HTTPException, OSError."""
    # An orchestrator always says how long its answer is. Without that, one whose head was cut off would look whole.
    if answer.length is None and not answer.chunked:
        raise NoAnswer("the answer was cut off in its head")
    return answer.status, answer.read()
