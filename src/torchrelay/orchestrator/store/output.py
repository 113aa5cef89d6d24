"""Output: what workers print on other machines stands in the run's folder, too, so that the launcher can show it."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from torchrelay.protocol.messages.ids import NodeId
from torchrelay.wire.files.bounded import MB, BoundedLog, Bounds
from torchrelay.wire.messages.channel import OutputFrame, Printed

RANK = re.compile(r"rank-\d{1,9}\.log")
WORKER = re.compile(r"\.\d{1,9}\.\d{1,19}\.log")  # after the node's name
# Whatever agents say: no more files than these, and the more there are, the smaller: 10 GB altogether, at the most.
MOST_LOGS = 50_000
LARGEST, SMALLEST, TOGETHER = 32 * MB, 0.064 * MB, 1_000 * MB
RATE = 2 * MB


class Output:
    """Logs in one folder. Raises nothing: a full disk here is no reason to part with an agent."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._logs: dict[str, BoundedLog] = {}
        self._printed: defaultdict[NodeId, dict[str, Printed]] = defaultdict(dict)

    def write(self, node: NodeId, frame: OutputFrame) -> bool:
        """Add lines of a node to a log. False if that is no name of a log of its workers, or there are too many."""
        upto = frame.upto
        if not is_of(node, upto.log) or (upto.log not in self._logs and len(self._logs) >= MOST_LOGS):
            return False
        self._printed[node][upto.log] = upto
        log = self._logs.get(upto.log)
        if log is None:
            log = self._logs[upto.log] = BoundedLog(self._folder / upto.log, bounds(len(self._logs) + 1))
        log.write("".join(f"{line}\n" for line in frame.lines).encode("utf-8", "replace"))
        log.settle()
        log.close()  # a job has more ranks than a process may have open files
        return True

    def printed(self, node: NodeId) -> tuple[Printed, ...]:
        """What has come of a node's logs."""
        return tuple(self._printed.get(node, {}).values())


def is_of(node: NodeId, name: str) -> bool:
    """Whether this is the name of a log of a node's workers. Other logs are not theirs to write."""
    return bool(RANK.fullmatch(name) or (name.startswith(node) and WORKER.fullmatch(name.removeprefix(node))))


def bounds(logs: int) -> Bounds:
    """Of the newest of so many logs."""
    return Bounds(size=min(LARGEST, max(SMALLEST, TOGETHER / logs)), rate=RATE)
