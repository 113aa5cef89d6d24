"""Ledger file: the ledger of a run as `ledger.jsonl` keeps it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from torchrelay.api.shown import Incidents
from torchrelay.goodput.ledger import Line, line_of

FILE = "ledger.jsonl"


def ledger(found: Incidents) -> tuple[Line, ...]:
    """All lines of a job, oldest first."""
    return tuple(line_of(incident) for incident in found.incidents)


def jsonl(lines: Sequence[Line]) -> str:
    return "".join(msgspec.json.encode(line).decode() + "\n" for line in lines)


def write_ledger(run_dir: Path, lines: Sequence[Line]) -> Path:
    """Write `ledger.jsonl`, whole or not at all. Raises OSError."""
    path = run_dir / FILE
    draft = path.with_name(f".{FILE}.{os.getpid()}")
    draft.write_text(jsonl(lines))
    draft.replace(path)
    return path
