"""Proof, for tests and the demonstration: a digest of everything that training depends on, at the entry of each call.

With TORCHRELAY_DIGESTS=DIR every rank appends lines to DIR/rank-<r>.jsonl: {"point", "digest", "generation", "worker"}.
Two runs are bit-equal if they wrote the same digests at the same points; in a generation a rank has one worker.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from torchrelay.worker.data.cursor import Cursor
from torchrelay.worker.session import Session
from torchrelay.worker.state.state import State
from torchrelay.worker.tensors.digest import Digest

VARIABLE = "TORCHRELAY_DIGESTS"


class Proof:
    """Where the digests of one rank go."""

    def __init__(self, path: Path, session: Session, state: State, cursor: Cursor) -> None:
        self._file = path.open("a", buffering=1)
        self._session = session
        self._state = state
        self._cursor = cursor

    @classmethod
    def from_environment(cls, session: Session, state: State, cursor: Cursor) -> Proof | None:
        """None unless it is asked for."""
        folder = os.environ.get(VARIABLE)
        if not folder:
            return None
        Path(folder).mkdir(parents=True, exist_ok=True)
        return cls(Path(folder) / f"rank-{session.rank}.jsonl", session, state, cursor)

    def note(self, rng: bytes) -> None:
        """Write the digest at the current point; `rng` is the random state now."""
        digest = Digest()
        digest.add(self._state.digest().encode())
        digest.add(rng)
        digest.add(json.dumps(self._cursor.counts()).encode())
        line = {
            "point": str(self._cursor.point),
            "digest": digest.text(),
            "generation": self._session.standing.wired,
            "worker": self._session.worker,
        }
        self._file.write(json.dumps(line) + "\n")
