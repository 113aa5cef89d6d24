"""Recovery: SIGKILL of one of 4 ranks in backward, 20 times; torchrun's restart from a checkpoint beside it.

    make bench NAME=recovery

unplanned_pause    kill to the next committed step of the last rank, less one undisturbed step (median and maximum)
restart_pause      the same of torchrun, with --max-restarts and a checkpoint every 10 steps
restart_lost_steps steps that had to be done again, per kill (median)
restore_bandwidth_ratio   1 GB of state, digest included, against one plain TCP stream in the same run
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from figures import finish, progress
from restore import restore_figures
from steps import read_times, step_time_s, wait_for
from torchrelay.client.client import Client

HERE = Path(__file__).parent
RANKS = 4


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", *words]


class Kill:
    """Kill orders for the workload: who, when it happened, and how far the others had come."""

    def __init__(self, folder: Path, times: Path, ranks: int = RANKS) -> None:
        self.folder, self.times, self.ranks = folder, times, ranks

    def strike(self, rank: int, *, deadline_s: float) -> int:
        """Kill this rank in its next backward; returns the time of death in ns."""
        (self.folder / f"rank-{rank}").write_text("")
        done = self.folder / f"done-{rank}"
        wait_for(f"death of rank {rank}", done.exists, deadline_s)
        at = int(done.read_text())
        done.unlink()
        return at

    def next_step(self, at: int, *, deadline_s: float) -> float:
        """Seconds from `at` to the next committed step of the last rank."""

        def all_after() -> bool:
            times = read_times(self.times)
            return len(times) == self.ranks and all(rows and rows[-1][1] > at for rows in times.values())

        wait_for("the next step of every rank", all_after, deadline_s)
        times = read_times(self.times)
        return max(min(row[1] for row in rows if row[1] > at) for rows in times.values()) / 1e9 - at / 1e9


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def settled(kill: Kill, steps: int) -> None:
    """Wait until every rank has done `steps` more steps."""
    before = {rank: len(rows) for rank, rows in read_times(kill.times).items()}

    def enough() -> bool:
        now = read_times(kill.times)
        return len(now) == kill.ranks and all(len(rows) >= before.get(rank, 0) + steps for rank, rows in now.items())

    wait_for(f"{steps} steps", enough, 180)


def our_pauses(work: Path, kills: int) -> tuple[list[float], float]:
    """The pauses with torchrelay, in seconds, and the time of an undisturbed step."""
    run_dir = work / "run"
    kill = Kill(prepare(work / "ours"), work / "ours" / "times")
    words = command("torchrelay.cli.main", "run", "--nproc-per-node", str(RANKS), "--spares", "2", "--slot-faults", "0")
    words += ["--run-dir", str(run_dir), "--quiet", str(HERE / "workload.py"), "--steps", "1000000"]
    words += ["--times", str(kill.times), "--kill", str(kill.folder)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    try:
        settled(kill, 10)
        client = Client.of(run_dir)
        pauses = []
        for number in range(kills):
            wait_for("a warm spare", lambda: client.status()["spares"]["warm"] >= 1, 120)
            settled(kill, 5)
            at = kill.strike(number % RANKS, deadline_s=60)
            pauses.append(kill.next_step(at, deadline_s=120))
            progress(f"torchrelay: kill {number + 1} of {kills}: {pauses[-1]:.3f} s to the next step")
        return pauses, step_time_s(read_times(kill.times))
    finally:
        stop(process)


def prepare(folder: Path) -> Path:
    (folder / "times").mkdir(parents=True)
    (folder / "kill").mkdir()
    return folder / "kill"


def restart_pauses(work: Path, kills: int) -> tuple[list[float], list[int], float]:
    """The same under torchrun: pauses, steps that were done again, and the time of an undisturbed step."""
    kill = Kill(prepare(work / "torchrun"), work / "torchrun" / "times")
    words = command("torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", "100")
    words += ["--monitor-interval", "0.1", str(HERE / "workload.py"), "--steps", "1000000"]
    words += ["--times", str(kill.times), "--kill", str(kill.folder), "--checkpoint", str(work / "checkpoint.pt")]
    # Without it restarted ranks read the keys of the attempt before and connect to dead addresses.
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    log = (work / "torchrun.log").open("wb")
    process = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
    try:
        settled(kill, 10)
        pauses, lost = [], []
        for number in range(kills):
            settled(kill, 15)
            at = kill.strike(number % RANKS, deadline_s=60)
            done = max(row[0] for rows in read_times(kill.times).values() for row in rows if row[1] <= at)
            pauses.append(kill.next_step(at, deadline_s=300))
            again = [row for rows in read_times(kill.times).values() for row in rows if row[1] > at]
            lost.append(done - min(row[0] for row in again) + 1)
            progress(f"torchrun: kill {number + 1} of {kills}: {pauses[-1]:.2f} s, {lost[-1]} steps again")
        return pauses, lost, step_time_s(read_times(kill.times))
    finally:
        stop(process)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--restarts", type=int, default=5, help="kills under torchrun; each takes many seconds")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="torchrelay-bench-"))
    try:
        pauses, step = our_pauses(work, options.kills)
        restarts, lost, their_step = restart_pauses(work, options.restarts)
        figures: dict[str, object] = {
            "unplanned_pause_p50_s": statistics.median(pauses) - step,
            "unplanned_pause_max_s": max(pauses) - step,
            "step_s": step,
            "restart_pause_p50_s": statistics.median(restarts) - their_step,
            "restart_lost_steps": statistics.median(lost),
        }
        figures |= restore_figures(options.gigabytes)
        finish("recovery", figures, kills=options.kills, restarts=options.restarts, pauses_s=pauses)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
