"""Endpoint: where the orchestrator of a run can be reached, in `RUN_DIR/endpoint.json`."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from msgspec import Struct

from torchrelay.wire.files.owned import Foreign, read_owned

ENDPOINT = "endpoint.json"
TOKEN = "token"
JOURNAL = "journal.db"
LOGS = "logs"
FREEZE = "FREEZE"
LIFTED = ".FREEZE.lifted"  # by whom
RESTART = "restart.json"


class Endpoint(Struct, frozen=True, kw_only=True):
    """Written once the port is bound; `pid` is the orchestrator's, `journal` the name of its journal.

    `socket`: a unix socket for the same, in a folder that only its owner can enter. No stranger is in the way there.
    """

    url: str
    pid: int
    journal: str = ""
    socket: str = ""


def write_endpoint(run_dir: Path, endpoint: Endpoint) -> None:
    """Write it whole or not at all."""
    draft = run_dir / f".{ENDPOINT}.{os.getpid()}"
    draft.write_bytes(msgspec.json.encode(endpoint) + b"\n")
    draft.replace(run_dir / ENDPOINT)


def read_endpoint(run_dir: Path) -> Endpoint | None:
    """Where the orchestrator was last; None if it never was. Raises ValueError if the file is damaged, or a stranger's.

    Who asks there shows the run's token: to nobody whom another user has named.
    """
    try:
        return msgspec.json.decode(read_owned(run_dir / ENDPOINT).text, type=Endpoint)
    except FileNotFoundError:
        return None
    except Foreign as error:
        raise ValueError(f"{run_dir / ENDPOINT} is not trusted: {error}. Look who may write to {run_dir}") from error
    except msgspec.DecodeError as error:
        raise ValueError(f"{run_dir / ENDPOINT} cannot be read: {error}") from error
