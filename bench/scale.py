"""How large a job one orchestrator carries: players of agents over the real wire, against the real process.

    start    all attach, the job is submitted, and all ranks are told to go on
    at rest  all beat; the orchestrator's share of a core
    kills    a worker ends; from its WorkerExited to the last Interrupt, and to the last Resume
    burnt    the largest job again, with one core burnt beside
    faults   losses in every phase, a move, a node, a rack (`scale_faults`)
    journal  what a recovery writes, and how soon an orchestrator starts from a day of it (`scale_journal`)
    core     the core alone, in process: how its costs grow with the ranks (`scale_core`)

Players have a few processes of their own on the same cores: what they take is not the orchestrator's.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import msgspec

import scale_core
import scale_faults
import scale_journal
from figures import finish, progress
from scale_players import JOB
from scale_stage import Stage, wait_for
from torchrelay.client.client import Client
from torchrelay.protocol.messages.events import JobSpec

SIZES = (32, 128, 512, 1024, 2048)
SLOTS = 8
CORE_NODES = (33, 129, 513, 2_049)  # one of them with spares
CORE_KILLS = 3


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
            time.sleep(8)  # a job trains between two faults, and its journal is tidied
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


@contextmanager
def burning(processes: int) -> Iterator[None]:
    """So many cores are burnt beside."""
    words = [sys.executable, "-c", "while True: pass"]
    started_here = [subprocess.Popen(words) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started_here:
            process.kill()
            process.wait()


def burnt(nodes: int, options: argparse.Namespace) -> dict[str, float]:
    """The largest job with one core burnt beside: start, rest, a kill. Nobody that beats may be given up."""
    with staged(nodes, options) as stage, burning(1):
        progress(f"{nodes} agents, one core burnt: start, rest, a kill")
        started(stage, options.limit)
        time.sleep(options.watch)
        found = killed(stage, 3, options.limit)
        return {"burnt_resume_ms": found["resume_ms"], "burnt_false_losses": stage.false_losses()}


def faults(nodes: int, options: argparse.Namespace) -> list[dict[str, float | str]]:
    """What a job of this size lives through (`scale_faults`)."""
    with staged(nodes, options, scale_faults.SPARE_NODES) as stage:
        progress(f"{nodes} agents: start")
        started(stage, options.limit)
        time.sleep(5)  # some steps are committed
        return scale_faults.measure(stage, options.limit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="agents")
    parser.add_argument("--slots", type=int, default=SLOTS, help="of each agent")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--watch", type=float, default=20.0, help="seconds at rest")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that anything may take")
    parser.add_argument("--processes", type=int, default=2, help="of players")
    parser.add_argument("--faults-at", type=int, default=1024, help="agents of the job with faults; 0: none")
    parser.add_argument("--incidents", type=int, default=50, help="of the day in the journal; 0: none")
    options = parser.parse_args()
    rows: list[dict[str, float]] = []
    for nodes in options.sizes:
        rows.append(measure(nodes, options))
        print(msgspec.json.encode(rows[-1]).decode(), flush=True)
    figures = dict(rows[-1]) | burnt(options.sizes[-1], options)
    if len(rows) > 1:
        figures["wire_slope"] = slope(rows, "recovery_cpu_s")
    lived = faults(options.faults_at, options) if options.faults_at else []
    if options.incidents:
        day = scale_journal.measure(CORE_NODES[-1], options.incidents)
        figures |= {f"journal_{name}": value for name, value in day.items()}
    progress("the core alone")
    core = [scale_core.measure(nodes, CORE_KILLS) for nodes in CORE_NODES]
    figures |= {f"{name}_slope": slope(core, f"{name}_ms") for name in ("recovery", "event", "tick")}
    finish("scale", figures, sizes=rows, faults=lived, core=core)


if __name__ == "__main__":
    main()
