"""The stage of the scale bench: an orchestrator and its players, and what is asked of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

import scale_orchestrator
from scale_players import STEP_S, perform
from torchrelay.api.endpoint import TOKEN, read_endpoint


class Stage:
    """An orchestrator and its players."""

    def __init__(self, run_dir: Path, nodes: int, slots: int, processes: int, spare_nodes: int = 0) -> None:
        self.run_dir, self.nodes, self.slots = run_dir, nodes, slots
        self.ranks, self.spares = (nodes - spare_nodes) * slots, spare_nodes * slots
        self._troupes: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        words = [sys.executable, str(Path(scale_orchestrator.__file__)), "--run-dir", str(run_dir)]
        self._process = subprocess.Popen(words)
        self._processes = processes
        self._step, self._began_s, self._attempts = 0, 0.0, 0

    def open(self, limit_s: float) -> None:
        """Let all agents attach."""
        wait_for(lambda: read_endpoint(self.run_dir) is not None, limit_s, "the orchestrator does not listen")
        endpoint = read_endpoint(self.run_dir)
        assert endpoint is not None, "just seen"
        token = (self.run_dir / TOKEN).read_text().strip()
        context = multiprocessing.get_context("spawn")
        each = -(-self.nodes // self._processes)
        for first in range(0, self.nodes, each):
            numbers = range(first, min(first + each, self.nodes))
            ours, theirs = context.Pipe()
            troupe = context.Process(
                target=perform, args=(theirs, endpoint.url, token, numbers, self.nodes, self.slots), daemon=True
            )
            troupe.start()
            self._troupes.append((troupe, ours))
        wait_for(lambda: sum(self.ask("attached")) == self.nodes, limit_s, "not all agents attach")
        self._attempts = self.reconnects()  # all come at once: some have to try again

    def ask(self, word: str, *more: Any) -> list[Any]:
        """Ask the players of all processes."""
        for _, pipe in self._troupes:
            pipe.send((word, *more))
        return [pipe.recv() for _, pipe in self._troupes]

    def train(self) -> None:
        """All train on."""
        self._began_s = time.monotonic()
        self.ask("train", self._began_s)

    def stand(self) -> None:
        """All stand at the same point."""
        self._step += int((time.monotonic() - self._began_s) / STEP_S)
        self.ask("stand", self._step)

    def seen(self, kind: str, generation: int) -> tuple[int, float]:
        """How many orders of this kind have come, and when the last of them."""
        found = [one[kind, generation] for one in self.ask("seen") if (kind, generation) in one]
        return int(sum(one[0] for one in found)), max((one[2] for one in found), default=0.0)

    def generation(self) -> int:
        return max(int(generation) for one in self.ask("seen") for _, generation in one)

    def cpu_s(self) -> float:
        """Of the orchestrator, so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mb(self) -> float:
        """Of the orchestrator, now."""
        return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

    def noted(self) -> scale_orchestrator.Noted:
        """What the orchestrator sent and heard, and when."""
        path = self.run_dir / scale_orchestrator.NOTES
        path.unlink(missing_ok=True)
        self._process.send_signal(signal.SIGUSR1)
        wait_for(path.exists, 30.0, "the orchestrator does not tell what it noted")
        return msgspec.json.decode(path.read_bytes(), type=scale_orchestrator.Noted)

    def false_losses(self) -> int:
        """Nodes that were given up although they beat: so many connections had to be made anew."""
        log = self.run_dir / "logs" / "orchestrator.log"
        return log.read_text().count(" is lost") + self.reconnects() - self._attempts

    def reconnects(self) -> int:
        return sum(int(one[3]) for one in self.ask("counts"))

    def close(self) -> None:
        """End the processes that were started here."""
        for _, pipe in self._troupes:
            pipe.send(("stop",))
        for troupe, _ in self._troupes:
            troupe.join(10)
            if troupe.is_alive():
                troupe.kill()
                troupe.join()
        self._process.kill()
        self._process.wait()


def wait_for(fact: Callable[[], bool], limit_s: float, otherwise: str) -> None:
    until = time.monotonic() + limit_s
    while not fact():
        if time.monotonic() > until:
            raise TimeoutError(f"{otherwise} within {limit_s:g} s")
        time.sleep(0.05)
