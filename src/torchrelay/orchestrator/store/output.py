"""Output: what workers print on other machines stands in the run's folder, too, so that the launcher can show it."""

from __future__ import annotations

import re
from pathlib import Path

from torchrelay.wire.files.bounded import MB, BoundedLog, Bounds

LOG = re.compile(r"(?!agent-|orchestrator)[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.log")
MOST_LOGS = 10_000  # whatever agents say, no more files than these
BOUNDS = Bounds(size=32 * MB, rate=2 * MB)


class Output:
    """Logs in one folder. Raises nothing: a full disk here is no reason to part with an agent."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._logs: dict[str, BoundedLog] = {}

    def write(self, name: str, lines: tuple[str, ...]) -> bool:
        """Add lines to a log. False if that is no name of a worker's log."""
        if not LOG.fullmatch(name) or (name not in self._logs and len(self._logs) >= MOST_LOGS):
            return False
        log = self._logs.setdefault(name, BoundedLog(self._folder / name, BOUNDS))
        log.write("".join(f"{line}\n" for line in lines).encode("utf-8", "replace"))
        log.settle()
        log.close()  # a job has more ranks than a process may have open files
        return True
