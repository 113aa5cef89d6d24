"""What a recovery costs each rank, with 8 and with 48 real ranks on this machine: all processes, Gloo, CPU.

    make bench NAME=many_ranks

recovery_ms_8, recovery_ms_48   CPU time of a rank's process from where it stops until it goes on (mean of the
                                ranks, median of the kills)
growth                          the latter over the former
gloo_ms_8, gloo_ms_48           what plain PyTorch takes to make, use and end a Gloo group: each rank connects to each
                                other, and every recovery needs one
growth_beside_gloo              growth of what is left without that
cpu_ms_8, cpu_ms_48             CPU time of a surviving rank from the SIGKILL until all have resumed: with what is left
                                of its step, and the beginning of the step made again. Steps mostly sleep
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median

from figures import finish, progress
from torchrelay.client.client import Away, Client

HERE = Path(__file__).parent
SIZES = (8, 48)
EACH = 4  # ranks of a node
PEACE_S = 3.0  # between two kills


def cpu_ms(pid: int) -> float:
    """CPU time of a process so far, also of its threads that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return 1000 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_for(what: str, fact: Callable[[], bool], deadline_s: float) -> None:
    until = time.monotonic() + deadline_s
    while not fact():
        if time.monotonic() > until:
            raise TimeoutError(f"{what} did not come within {deadline_s:g} s")
        time.sleep(0.02)


def resumed(client: Client, generation: int) -> bool:
    job = client.job()
    return job.phase == "running" and job.generation >= generation


class Job:
    """A job of so many ranks that trains."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.run_dir, self.ranks = folder / f"run-{ranks}", ranks
        words = [sys.executable, "-m", "torchrelay.cli.main", "run", "--nodes", str(ranks // EACH)]
        words += ["--nproc-per-node", str(EACH), "--spares", "1", "--slot-faults", "0", "--quiet"]
        words += ["--run-dir", str(self.run_dir), str(HERE / "many_ranks_worker.py")]
        self.notes = folder / f"notes-{ranks}"
        more = {"OMP_NUM_THREADS": "1", "MANY_RANKS_NOTES": str(self.notes)}
        self.process = subprocess.Popen(words, env={**os.environ, **more})

    @property
    def client(self) -> Client:
        return Client.of(self.run_dir)

    def trains(self, generation: int) -> bool:
        """Whether all ranks train, in this generation or a later one, and a spare is there."""
        try:
            job, rows = self.client.job(), self.client.view_ranks().ranks
        except (Away, OSError, ValueError):
            return False
        held = [row for row in rows if row.rank is not None]
        spares = [row for row in rows if row.rank is None and row.state == "warm"]
        steady = all(row.pid and not row.replacement and (row.step or 0) > 0 for row in held)
        return (
            job.phase == "running"
            and job.generation >= generation
            and len(held) == self.ranks
            and steady
            and bool(spares)
        )

    def pids(self) -> dict[int, int]:
        """Of each rank's worker."""
        return {row.rank: row.pid for row in self.client.view_ranks().ranks if row.rank is not None and row.pid}

    def stops(self) -> list[float]:
        """What each survivor of each kill so far has used."""
        return [float(line) for line in self.notes.read_text().split()] if self.notes.exists() else []

    def kill(self, rank: int) -> tuple[float, float]:
        """SIGKILL one; the CPU time in ms that each of the others uses while it stops, and until all have resumed."""
        client, generation, before = self.client, self.client.job().generation, self.pids()
        survivors = [pid for one, pid in before.items() if one != rank]
        known = len(self.stops())
        first = {pid: cpu_ms(pid) for pid in survivors}
        os.kill(before[rank], signal.SIGKILL)
        wait_for("the job's recovery", lambda: resumed(client, generation + 1), 60)
        used = mean(cpu_ms(pid) - first[pid] for pid in survivors)
        wait_for("a calm job", lambda: self.trains(generation + 1), 120)
        time.sleep(PEACE_S)
        return mean(self.stops()[known:]), used

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(90)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def measure(folder: Path, ranks: int, kills: int) -> list[tuple[float, float]]:
    job = Job(folder, ranks)
    try:
        progress(f"{ranks} ranks: start")
        wait_for(f"{ranks} ranks that train", lambda: job.trains(1), 600)
        found = []
        for number in range(kills):
            progress(f"{ranks} ranks: kill {number + 1} of {kills}")
            found.append(job.kill((number * 3 + 1) % ranks))
        return found
    finally:
        job.end()


def gloo_ms(ranks: int) -> float:
    """What a Gloo group of so many costs each rank, in CPU milliseconds."""
    progress(f"{ranks} ranks: plain Gloo groups")
    words = [sys.executable, str(HERE / "many_ranks_gloo.py"), str(ranks)]
    return float(subprocess.run(words, check=True, capture_output=True, text=True, timeout=300).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="torchrelay-bench-"))
    try:
        found = {ranks: measure(folder, ranks, options.kills) for ranks in options.sizes}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    stopped = {ranks: median(each for each, _ in some) for ranks, some in found.items()}
    plain = {ranks: gloo_ms(ranks) for ranks in options.sizes}
    few, many = options.sizes[0], options.sizes[-1]
    figures: dict[str, object] = {f"recovery_ms_{ranks}": cost for ranks, cost in stopped.items()}
    figures["growth"] = stopped[many] / stopped[few]
    figures |= {f"gloo_ms_{ranks}": cost for ranks, cost in plain.items()}
    figures["growth_beside_gloo"] = (stopped[many] - plain[many]) / (stopped[few] - plain[few])
    figures |= {f"cpu_ms_{ranks}": median(each for _, each in some) for ranks, some in found.items()}
    finish("many_ranks", figures, kills={str(ranks): some for ranks, some in found.items()})


if __name__ == "__main__":
    main()
