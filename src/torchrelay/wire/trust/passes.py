"""Passes: one file by which a process reaches one job in one role: certificate, key, the job's authority, and a token.

    RUN_DIR/passes/agent.pem      for nodes: it may attach, and read what is to be run
    RUN_DIR/passes/operator.pem   looks, and changes
    RUN_DIR/passes/viewer.pem     only looks

Whoever holds the file is believed, so it is readable by its owner only. `authority` makes passes; to use one needs
the standard library alone. Both ends of a connection show their certificates (TLS 1.3), and each is of the same job:
another job has another authority. Which role a certificate is for stands in it as its name. So no agent can pose as an
orchestrator, wherever either of them runs.
"""

from __future__ import annotations

import os
import re
import ssl
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from torchrelay.wire.trust.tokens import TrustError, write_private
from torchrelay.wire.trust.tokens import read_private as read_private

FOLDER = "passes"
HANDSHAKE_S = 5.0  # within which a peer must have shown its certificate
_SUFFIX = ".torchrelay"  # of names that no machine has
_TOKEN = "TORCHRELAY TOKEN"
LAST_LINE = f"-----END {_TOKEN}-----"
_MOST = 64 << 10  # bytes that are read of a pass
_BLOCK = re.compile(r"-----BEGIN (?P<kind>[A-Z ]+)-----\n(?P<body>.*?)\n-----END (?P=kind)-----\n?", re.DOTALL)


class Role(StrEnum):
    """What the holder of a pass may do."""

    ORCHESTRATOR = "orchestrator"  # decides, and listens
    AGENT = "agent"
    OPERATOR = "operator"
    VIEWER = "viewer"

    @property
    def server_name(self) -> str:
        """The name in its certificate."""
        return self.value + _SUFFIX


@dataclass(frozen=True, slots=True)
class Pass:
    """What a pass holds, as PEM. Only its path is ever shown: see `__repr__`."""

    certificate: str
    key: str
    authority: str
    token: str

    def __repr__(self) -> str:
        return "Pass(...)"  # a key must not reach a log

    def text(self) -> str:
        """As it stands in a file: its own certificate first, as OpenSSL expects it."""
        body = b64encode(self.token.encode()).decode()  # OpenSSL decodes all blocks of the file
        token = f"-----BEGIN {_TOKEN}-----\n{body}\n-----END {_TOKEN}-----\n"
        return f"{self.certificate}{self.key}{self.authority}{token}"


def pass_of(run_dir: Path, role: Role) -> Path:
    """Where a run keeps the pass for this role."""
    return run_dir / FOLDER / f"{role}.pem"


def write_pass(path: Path, held: Pass) -> Path:
    """Write a pass where only its owner can read it, whole or not at all. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return write_private(path, held.text())


def read_pass(path: Path) -> Pass:
    """Read a pass. Raises `TrustError`, with the remedy, if there is none, or if others can read or have made it."""
    return parse_pass(read_private(path, _MOST).decode("ascii", "replace"), str(path))


def parse_pass(text: str, where: str) -> Pass:
    """What the text of a pass holds. Raises `TrustError`."""
    blocks = [(found["kind"], found[0], found["body"]) for found in _BLOCK.finditer(text)]
    certificates = [whole for kind, whole, _ in blocks if kind == "CERTIFICATE"]
    keys = [whole for kind, whole, _ in blocks if kind == "PRIVATE KEY"]
    tokens = [_token_in(body) for kind, _, body in blocks if kind == _TOKEN]
    if len(certificates) != 2 or len(keys) != 1 or len(tokens) != 1 or not tokens[0]:
        raise TrustError(f"{where} is not a pass. Copy one from the folder `{FOLDER}` of the run.")
    return Pass(certificates[0], keys[0], certificates[1], tokens[0])


def _token_in(body: str) -> str:
    """The token; empty if it is none."""
    try:
        text = b64decode(body, validate=True).decode("ascii")
    except ValueError:
        return ""
    return text if text.isprintable() and " " not in text else ""


def server_context(path: Path) -> ssl.SSLContext:
    """For the end that listens: whoever connects shows a certificate of the same job. Raises `TrustError`."""
    return _context(ssl.PROTOCOL_TLS_SERVER, path)


def client_context(path: Path) -> ssl.SSLContext:
    """For the end that connects; give it the role's `server_name`, which is checked. Raises `TrustError`."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, path)


def _context(side: int, path: Path) -> ssl.SSLContext:
    held = read_pass(path)
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(cadata=held.authority)
        context.load_cert_chain(os.fspath(path))
    except (ssl.SSLError, ValueError) as error:
        raise TrustError(f"{path} does not hold a usable certificate: {error}. Copy the run's pass again.") from error
    return context


def role_in(certificate: Mapping[str, Any] | None) -> Role | None:
    """The role that a peer's checked certificate is for, as `SSLSocket.getpeercert` tells it; None: it shows none."""
    names = {value for kind, value in (certificate or {}).get("subjectAltName", ()) if kind == "DNS"}
    return next((role for role in Role if role.server_name in names), None)
