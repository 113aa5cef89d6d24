"""Asking: one HTTP request to an orchestrator, through the run's unix socket or its port."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import closing
from http.client import BadStatusLine, HTTPConnection, HTTPException, HTTPResponse, IncompleteRead
from pathlib import Path
from urllib.parse import urlsplit


class NoAnswer(ConnectionError):
    """The answer is missing, cut off, or not HTTP."""


class Connection(HTTPConnection):
    """Connects to a unix socket, if there is one, else to the port; there with TLS, if there is a pass."""

    def __init__(self, host: str, port: int, timeout_s: float, inside: str, held: Path | None) -> None:
        super().__init__(host, port, timeout=timeout_s)
        self._inside = inside
        self._pass = held

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
        if self._pass is not None:
            from torchrelay.wire.trust.passes import Role, client_context  # ssl takes time to import

            context = client_context(self._pass)
            self.sock = context.wrap_socket(self.sock, server_hostname=Role.ORCHESTRATOR.server_name)


def ask(
    url: str,
    method: str,
    path: str,
    headers: Mapping[str, str],
    body: bytes,
    timeout_s: float,
    inside: str = "",
    held: Path | None = None,
) -> tuple[int, bytes]:
    """The status and the body of the answer. Raises `NoAnswer`, or OSError, if there is none.

    `inside`: a unix socket that leads to the same; if it does not accept connections, the URL is asked.
    `held`: the pass to show there, for an https URL. Raises `TrustError` if it cannot be used.
    """
    where = urlsplit(url)
    wanted = "http" if held is None else "https"
    if where.hostname is None or where.scheme not in ("http", "https"):
        raise NoAnswer(f"{url!r} is no http URL")
    if where.scheme != wanted and not (inside and os.path.exists(inside)):
        raise NoAnswer(f"{url} is reached with a pass and over https, or with neither")
    # The library would refuse such a line, too, but its error quotes the value, and that may be the token.
    if any(control in text for text in (path, *headers, *headers.values()) for control in "\r\n"):
        raise NoAnswer("a line break in a header")
    # A user's name may hold characters that a header cannot.
    encoded = {name: value.encode("latin-1", "replace") for name, value in headers.items()}
    with closing(Connection(where.hostname, where.port or 80, timeout_s, inside, held)) as connection:
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
