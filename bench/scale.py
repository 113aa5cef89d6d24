"""How large a job one orchestrator carries: players of agents over the real wire, against the real process.

    start    all attach, the job is submitted, and all ranks are told to go on
    at rest  all beat; the orchestrator's share of a core
    kills    a worker ends; from its WorkerExited to the last Interrupt, and to the last Resume
    core     the core alone, in process: how its costs grow with the ranks (`scale_core`)

Players have a few processes of their own on the same cores: what they take is not the orchestrator's.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

import scale_core
import scale_orchestrator
from figures import finish, progress
from scale_players import JOB, STEP_S, perform
from torchrelay.api.endpoint import TOKEN, read_endpoint
from torchrelay.client.client import Client
from torchrelay.protocol.messages.events import JobSpec

SIZES = (32, 128, 512, 1024, 2048)
SLOTS = 8
CORE_NODES = (33, 129, 513, 2_049)  # one of them with spares
CORE_KILLS = 3


class Stage:
    """An orchestrator and its players."""

    def __init__(self, run_dir: Path, nodes: int, slots: int, processes: int, spare_nodes: int = 0) -> None:
        self.run_dir, self.nodes, self.slots = run_dir, nodes, slots
        self.ranks, self.spares = (nodes - spare_nodes) * slots, spare_nodes * slots
        self._troupes: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        words = [sys.executable, str(Path(scale_orchestrator.__file__)), "--run-dir", str(run_dir)]
        self._process = subprocess.Popen(words)
        self._processes = processes
        self._step, self._began_s = 0, 0.0

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
        return log.read_text().count(" is lost") + sum(int(one[3]) for one in self.ask("counts"))

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


@contextmanager
def staged(nodes: int, options: argparse.Namespace, spare_nodes: int = 0) -> Iterator[Stage]:
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(Path(folder), nodes, options.slots, options.processes, spare_nodes)
        try:
            yield stage
        finally:
            stage.close()


def started(stage: Stage, limit_s: float) -> dict[str, float]:
    """All attach, and a job of all their slots comes up."""
    begun = time.monotonic()
    stage.open(limit_s)
    attached = time.monotonic()
    before = stage.cpu_s()
    spec = JobSpec(
        job=JOB,
        world_size=stage.ranks,
        nproc_per_node=stage.slots,
        nodes=stage.ranks // stage.slots,
        spares=stage.spares,
    )
    Client.of(stage.run_dir).submit(spec)
    wait_for(lambda: stage.seen("Resume", 1)[0] >= stage.ranks, limit_s, "the job does not come up")
    _, last = stage.seen("Resume", 1)
    stage.train()
    return {"attach_s": attached - begun, "start_s": last - attached, "start_cpu_s": stage.cpu_s() - before}


def at_rest(stage: Stage, watch_s: float) -> dict[str, float]:
    """What it takes while nothing happens."""
    time.sleep(5)  # what follows from the start is over by then
    before, counts = stage.cpu_s(), [sum(part) for part in zip(*stage.ask("counts"), strict=True)]
    begun = time.monotonic()
    time.sleep(watch_s)
    took = time.monotonic() - begun
    after = [sum(part) for part in zip(*stage.ask("counts"), strict=True)]
    return {
        "rest_cpu_share": (stage.cpu_s() - before) / took,
        "rest_frames_per_s": (after[0] - counts[0]) / took,
        "memory_mb": stage.memory_mb(),
    }


def killed(stage: Stage, number: int, limit_s: float) -> dict[str, float]:
    """One worker ends. `interrupt_ms`, `resume_ms`: from its end to the last of these orders that was sent;
    `resume_cpu_s`: from the last answer that this one waits for, to that; `seen_ms`: when the last player had it."""
    generation = stage.generation() + 1
    before = stage.cpu_s()
    stage.stand()
    told = min(stage.ask("kill", [(number, 1)]))
    wait_for(lambda: stage.seen("Resume", generation)[0] >= stage.ranks, limit_s, "the job does not recover")
    seen = stage.seen("Resume", generation)[1]
    took = stage.cpu_s() - before
    noted = {kind: places[generation] for kind, places in stage.noted().items() if generation in places}
    stage.train()
    (_, interrupted, _), (_, resumed, resumed_cpu) = noted["Interrupt"], noted["Resume"]
    answered_cpu = max(noted[kind][2] for kind in ("WorkerReconfigured", "StateRestored"))
    return {
        "interrupt_ms": 1000 * (interrupted - told),
        "resume_ms": 1000 * (resumed - told),
        "seen_ms": 1000 * (seen - told),
        "resume_cpu_s": resumed_cpu - answered_cpu,
        "recovery_cpu_s": took,
    }


def measure(nodes: int, options: argparse.Namespace) -> dict[str, float]:
    """One size."""
    with staged(nodes, options) as stage:
        progress(f"{nodes} agents: start")
        figures = started(stage, options.limit)
        progress(f"{nodes} agents: at rest")
        figures |= at_rest(stage, options.watch)
        kills: list[dict[str, float]] = []
        for kill in range(options.kills):
            progress(f"{nodes} agents: kill {kill + 1} of {options.kills}")
            kills.append(killed(stage, (7 * kill + 3) % nodes, options.limit))
            time.sleep(2)  # a job trains between two faults
        for name in kills[0] if kills else ():
            figures[name] = median(one[name] for one in kills)
        figures["interrupt_p99_ms"] = max(one["interrupt_ms"] for one in kills) if kills else math.nan
        figures["false_losses"] = stage.false_losses()
        journal = sum(path.stat().st_size for path in stage.run_dir.glob("journal.db*"))
        return {"ranks": stage.ranks, **figures, "journal_mb": journal / 1e6}


def slope(rows: list[dict[str, float]], cost: str) -> float:
    """Of a cost over ranks: of a line through the logarithms, by least squares. 1: it grows as the ranks do."""
    xs, ys = [math.log(one["ranks"]) for one in rows], [math.log(one[cost]) for one in rows]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="agents")
    parser.add_argument("--slots", type=int, default=SLOTS, help="of each agent")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--watch", type=float, default=20.0, help="seconds at rest")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that anything may take")
    parser.add_argument("--processes", type=int, default=2, help="of players")
    options = parser.parse_args()
    rows: list[dict[str, float]] = []
    for nodes in options.sizes:
        rows.append(measure(nodes, options))
        print(msgspec.json.encode(rows[-1]).decode(), flush=True)
    figures = dict(rows[-1])
    if len(rows) > 1:
        figures["wire_slope"] = slope(rows, "recovery_cpu_s")
    progress("the core alone")
    core = [scale_core.measure(nodes, CORE_KILLS) for nodes in CORE_NODES]
    figures |= {f"{name}_slope": slope(core, f"{name}_ms") for name in ("recovery", "event", "tick")}
    finish("scale", figures, sizes=rows, core=core)


if __name__ == "__main__":
    main()
