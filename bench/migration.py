"""Migration: planned moves of ranks that are well, 20 times, 4 ranks on two virtual nodes, spares on a third.

    make bench NAME=migration

planned_pause     one rank: the longest gap between two committed steps from halt to resumption, less one step
planned_standstill   the same by the ledger: from the first rank that stands at the boundary to training on
drain_pause       the same for a node of two ranks, in one generation; drain_pause_ratio is to one rank's
planned_pause_1gb the same for 1 GB of state, most of it a table that is not trained: steps are short, so that the
                  pause can be told from them. copy_1gb_s: its bytes over the stream measured in the same run.
                  The nodes are virtual: the state is read out of the outgoing worker's memory. With _sent: it is sent.
                  With _trained: all of it is trained, and a step takes some seconds here
prepare_speed_ratio   the speed of training while the target is prepared, over the speed before
unplanned_pause   for comparison in the same run: SIGKILL instead of a move, kill to the next step, less one step
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from figures import finish, progress
from recovery import RANKS, Kill, command, prepare, settled, stop
from restore import restore_figures
from steps import read_times, step_time_s, wait_for
from torchrelay.api.shown import MoveView
from torchrelay.client.client import Client

HERE = Path(__file__).parent


@dataclass
class Moving:
    """A job whose ranks are moved to and fro."""

    run_dir: Path
    times: Path
    size: str
    neighbours: bool = True  # states are read where they lie, on the same machine
    layout: str = "ddp"
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self, kill: Path) -> None:
        words = command("torchrelay.cli.main", "run", "--nodes", "2", "--nproc-per-node", "2", "--spare-nodes", "1")
        words += ["--slot-faults", "0", "--moves-per-hour", "-1", "--run-dir", str(self.run_dir), "--quiet"]
        words += [str(HERE / "workload.py"), "--size", self.size, "--layout", self.layout, "--steps", "1000000"]
        words += ["--times", str(self.times), "--kill", str(kill)]
        env = {**os.environ, "TORCHRELAY_NEIGHBOURS": str(int(self.neighbours))}
        self.process = subprocess.Popen(words, stdout=subprocess.DEVNULL, env=env)

    def order(self, path: str, **body: object) -> None:
        """Give an order by the API: a command that starts beside the ranks would take their processor for a while."""
        client = Client.of(self.run_dir)
        client.change(path.format(job=client.name_of(None)), body, dry_run=False)

    def moves(self) -> list[MoveView]:
        return list(Client.of(self.run_dir).view_moves(None).moves)

    def await_move(self, number: int, *, deadline_s: float) -> MoveView:
        """The n-th move, once it is over. Raises `RuntimeError` if it was not carried out."""

        def over() -> bool:
            moves = self.moves()
            return len(moves) >= number and not moves[number - 1].open

        wait_for(f"move {number}", over, deadline_s)
        move = self.moves()[number - 1]
        if move.state != "done":
            raise RuntimeError(f"move {number} came to nothing: {move}")
        return move

    def await_spares(self, count: int) -> None:
        wait_for(f"{count} warm spares", lambda: Client.of(self.run_dir).status()["spares"]["warm"] >= count, 120)


def spans_s(times: dict[int, list[tuple[int, int, int]]], begin: int, end: int) -> list[float]:
    """The times between two commits of a rank that touch begin..end (ns), in seconds, of all ranks."""
    found = []
    for rows in times.values():
        stamps = sorted(row[1] for row in rows)
        found += [(b - a) / 1e9 for a, b in pairwise(stamps) if b > begin and a < end]
    return found


@dataclass(frozen=True)
class Moved:
    """One move: the pause beyond one step, the standstill by the ledger (s), the speed while targets were prepared."""

    pause_s: float
    ledger_s: float
    speed_ratio: float


def one_move(job: Moving, kill: Kill, number: int, path: str, **body: object) -> Moved:
    """Order a move and measure it. The pause is the longest gap between commits from the halt to the resumption."""
    before_ns = time.monotonic_ns()
    job.order(path, **body)
    move = job.await_move(number, deadline_s=240)
    settled(kill, 3)
    times = read_times(job.times)
    asked_ns = time.monotonic_ns() - round(1e9 * (time.time() - datetime.fromisoformat(move.asked).timestamp()))
    at = {told.text.split()[0]: asked_ns + 1_000_000 * told.after_ms for told in move.story}
    before = spans_s(times, before_ns - 4_000_000_000, before_ns)
    beside = statistics.mean(spans_s(times, at["prepares"], at["all"]))
    gap = max(spans_s(times, at["all"], at["training"]))
    return Moved(gap - statistics.median(before), (move.pause_ms or 0) / 1000, statistics.mean(before) / beside)


def small_state(work: Path, options: argparse.Namespace) -> dict[str, object]:
    """4 M parameters: single ranks, whole nodes, and kills beside them."""
    kill = Kill(prepare(work), work / "times")
    job = Moving(work / "run", work / "times", "4m")
    job.start(kill.folder)
    try:
        settled(kill, 20)
        singles, drains, kills = [], [], []
        for number in range(options.moves):
            job.await_spares(2)
            settled(kill, 10)
            singles.append(one_move(job, kill, number + 1, "/v1/jobs/{job}/migrate", ranks=[number % RANKS]))
            progress(f"move {number + 1} of {options.moves}: {singles[-1].pause_s:.3f} s beyond one step")
        for number in range(options.drains):
            job.await_spares(2)
            settled(kill, 10)
            node = crowded(job)
            drains.append(one_move(job, kill, options.moves + number + 1, "/v1/drain", node=node))
            job.order("/v1/undrain", node=node)
            progress(f"drain {number + 1} of {options.drains}: {drains[-1].pause_s:.3f} s beyond one step")
        for number in range(options.kills):
            job.await_spares(2)
            settled(kill, 10)
            at = kill.strike(number % RANKS, deadline_s=60)
            kills.append(kill.next_step(at, deadline_s=120) - step_time_s(read_times(job.times)))
            progress(f"kill {number + 1} of {options.kills}: {kills[-1]:.3f} s beyond one step")
    finally:
        stop(job.process)
    pauses = [one.pause_s for one in singles]
    drained = [one.pause_s for one in drains]
    return {
        "planned_pause_p50_s": statistics.median(pauses),
        "planned_pause_max_s": max(pauses),
        "drain_pause_p50_s": statistics.median(drained),
        "drain_pause_ratio": statistics.median(drained) / statistics.median(pauses),
        "planned_standstill_p50_s": statistics.median(one.ledger_s for one in singles),
        "drain_standstill_p50_s": statistics.median(one.ledger_s for one in drains),
        "prepare_speed_ratio": statistics.median(one.speed_ratio for one in singles),
        "unplanned_pause_p50_s": statistics.median(kills),
        "step_s": step_time_s(read_times(job.times)),
        "planned_pauses_s": pauses,
        "drain_pauses_s": drained,
    }


def crowded(job: Moving) -> str:
    """The node with the most ranks, so that a drain moves two."""
    places = [row["node"] for row in Client.of(job.run_dir).ranks()["ranks"] if row["rank"] is not None]
    return str(max(sorted(set(places)), key=places.count))


LARGE = {"": ("1gb-frozen", True), "_sent": ("1gb-frozen", False), "_trained": ("1gb", True)}


def large_state(work: Path, moves: int) -> dict[str, object]:
    """About 1 GB of state: the pause, and how long its bytes take in a plain stream of the same run."""
    if not moves:
        return {}
    stream = restore_figures(1.0)["plain_stream_gb_per_s"]
    figures: dict[str, object] = {"plain_stream_gb_per_s": stream}
    for suffix, (size, neighbours) in LARGE.items():
        found, nbytes, step = large_moves(work / f"large{suffix}", size, moves, neighbours=neighbours)
        pause = statistics.median(one.pause_s for one in found)
        copy = nbytes / 1e9 / stream
        figures |= {
            f"planned_pause_1gb{suffix}_s": pause,
            f"planned_pause_1gb{suffix}_beyond_copy_s": pause - copy,
            f"planned_standstill_1gb{suffix}_s": statistics.median(one.ledger_s for one in found),
            f"planned_pauses_1gb{suffix}_s": [one.pause_s for one in found],
            f"copy_1gb{suffix}_s": copy,
            f"step_1gb{suffix}_s": step,
        }
    return figures


def large_moves(work: Path, size: str, moves: int, *, neighbours: bool) -> tuple[list[Moved], int, float]:
    """The moves of one job, its state's bytes, its step time in seconds."""
    kill = Kill(prepare(work), work / "times")
    job = Moving(work / "run", work / "times", size, neighbours)
    job.start(kill.folder)
    try:
        settled(kill, 8)
        found = []
        for number in range(moves):
            job.await_spares(1)
            settled(kill, 6)
            found.append(one_move(job, kill, number + 1, "/v1/jobs/{job}/migrate", ranks=[number % RANKS]))
            progress(f"1 GB, move {number + 1} of {moves}: {found[-1].ledger_s:.3f} s standstill")
        return found, Client.of(job.run_dir).incidents()[-1]["bytes"], step_time_s(read_times(job.times))
    finally:
        stop(job.process)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moves", type=int, default=20)
    parser.add_argument("--drains", type=int, default=10)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--gigabyte-moves", type=int, default=5, help="of each kind")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="torchrelay-bench-"))
    try:
        figures = small_state(work / "small", options) | large_state(work, options.gigabyte_moves)
        finish("migration", figures, moves=options.moves, drains=options.drains, kills=options.kills)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
