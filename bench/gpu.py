"""GPU: ranks on one device under NCCL, killed in each phase and moved, against an undisturbed run; two gates, timed.

    make bench NAME=gpu [ARGS="--layouts ddp,hsdp --out DIR"]

Needs one CUDA device; without one it says so and ends with 77 (not run). Each rank passes for a host of its own
(NCCL_HOSTID), because NCCL refuses two ranks of one host on one device. So NCCL talks over sockets here: NVLink, shared
memory and InfiniBand are not used, and their failures are not seen. `--cpu` tries the bench itself, with Gloo.

A row for each layout and fault: whether the digests of every rank at every point are those of the undisturbed run in
processes of its own, and how long the ranks stood still.

bit_equal          all rows are
gpu_pause_p50_s    kill to the next committed step of the last rank, less one undisturbed step
gate_host_us       what a step takes longer when the host waits for the gate before it queues the update
gate_device_us     the same when a fused optimizer is guarded on the device (the gate's result as its `found_inf`)
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from figures import finish, progress

HERE = Path(__file__).parent
NOT_RUN = 77
LIMIT_S = 60.0  # of a job that takes about ten seconds
# One device: no transport that needs two. What torch's watchdog must not do is up to torchrelay, as for users.
TRANSPORT = {
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
    "NCCL_SOCKET_IFNAME": "lo",
}
RANKS = {"ddp": 2, "hsdp": 4}
TORCHRELAY = (sys.executable, "-m", "torchrelay.cli.main")


@dataclass(frozen=True)
class Cell:
    """A run that is disturbed. `kills`: step, rank and place of each, by the worker itself."""

    layout: str
    name: str
    kills: tuple[tuple[int, int, str], ...] = ()
    second: int | None = None  # a rank that is killed SECOND_S after the first
    moves: int | None = None  # a rank that is moved
    options: tuple[str, ...] = ()
    spares: int = 1
    steps: int = 30
    pace_s: float = 0.0  # between steps: a move takes seconds, as its target begins with nothing

    @property
    def faults(self) -> int:
        """How many are to happen, moves included."""
        return len(self.kills) + (self.second is not None) + (self.moves is not None)


SECOND_S = 0.3  # of the first recovery, which takes about a second: communicators are being connected


def cells_of(layout: str) -> list[Cell]:
    """All that is done to a layout."""
    return [
        Cell(layout, "undisturbed again", spares=0),
        Cell(layout, "killed in backward", kills=((10, 1, "backward"), (20, 0, "backward"))),
        Cell(layout, "killed in forward", kills=((10, 1, "forward"), (20, 0, "forward"))),
        Cell(layout, "killed between steps", kills=((10, 1, "between"), (20, 0, "between"))),
        Cell(layout, "exits at a loss that is no number", kills=((10, 1, "backward"),), options=("--exit",)),
        # Rank 1's shard is rank 3's, and rank 2's is rank 0's: with four ranks both have a replica that is left.
        *([Cell(layout, "killed in a recovery", ((10, 1, "backward"),), 2, spares=2)] if RANKS[layout] > 2 else []),
        Cell(layout, "moved", moves=1, pace_s=0.3),
    ]


@dataclass
class Outcome:
    """What became of a run."""

    code: int | None  # None: it did not end in time
    digests: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    pauses: list[float] = field(default_factory=list)
    step_s: float | None = None
    output: str = ""
    happened: int = 0  # of the faults


def gpu() -> str:
    """Its name, or nothing. Asked in a process of its own, so that this one holds no CUDA context."""
    probe = "import torch; print(torch.cuda.get_device_name(0), torch.cuda.nccl.version())"
    asked = subprocess.run([sys.executable, "-c", probe], check=False, capture_output=True, text=True)
    return asked.stdout.strip() if asked.returncode == 0 else ""


def run(work: Path, cell: Cell) -> Outcome:
    """One job. It is ended if it does not end by itself."""
    folder = work / f"{cell.layout} {cell.name}".replace(" ", "-")
    (folder / "digests").mkdir(parents=True)
    # The digests are of all that the script keeps, so both runs must have been given the same: plans are in a file.
    (folder / "plan.json").write_text(json.dumps({"kills": cell.kills, "pace_s": cell.pace_s}))
    words = [*TORCHRELAY, "run", "--nproc-per-node", str(RANKS[cell.layout]), "--run-dir", str(folder / "run")]
    words += ["--spares", str(cell.spares), "--slot-faults", "0", str(HERE / "gpu_worker.py"), "train"]
    words += ["--layout", cell.layout, "--steps", str(cell.steps), *cell.options]
    environment = {**os.environ, **TRANSPORT, "TORCHRELAY_DIGESTS": str(folder / "digests")}
    with (folder / "out").open("w") as out:
        job = subprocess.Popen(words, env=environment, cwd=folder, stdout=out, stderr=out)
        driver = threading.Thread(target=drive, args=(cell, folder, job))
        driver.start()
        try:
            code: int | None = job.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
            end(job)
        driver.join()
    told = (folder / "out").read_text()
    stacks = "" if code is not None else "".join(path.read_text() for path in sorted(folder.glob("stacks-*")))
    outcome = Outcome(code, digests(folder), output=told[-3000:] + stacks)
    outcome.happened = len(list(folder.glob("struck-*"))) + told.count("done: training goes on")
    outcome.pauses, outcome.step_s = pauses(folder)
    return outcome


def end(job: subprocess.Popen[bytes]) -> None:
    """The launcher ends its job on a second SIGTERM at once."""
    for _ in range(2):
        job.terminate()
        time.sleep(0.5)
    try:
        job.wait(15)
    except subprocess.TimeoutExpired:
        job.kill()


def drive(cell: Cell, folder: Path, job: subprocess.Popen[bytes]) -> None:
    """What is done to a job from outside."""
    if cell.second is not None and appears(folder / "struck-0", job):
        time.sleep(SECOND_S)  # into the recovery, which has no fact to wait for that is seen from here
        os.kill(int((folder / f"pid-{cell.second}").read_text()), signal.SIGKILL)
        (folder / "struck-second").write_text(str(time.monotonic_ns()))
    if cell.moves is not None and appears(folder / f"step-{cell.steps // 3}", job):
        words = [*TORCHRELAY, "migrate", "--run-dir", str(folder / "run"), str(cell.moves)]
        subprocess.run(words, check=False, capture_output=True, timeout=LIMIT_S)


def appears(path: Path, job: subprocess.Popen[bytes]) -> bool:
    """Wait for a file, as long as the job runs."""
    while not path.exists():
        if job.poll() is not None:
            return False
        time.sleep(0.01)
    return True


def digests(folder: Path) -> dict[tuple[str, str], set[str]]:
    """By rank and point."""
    found: dict[tuple[str, str], set[str]] = {}
    for path in (folder / "digests").glob("rank-*.jsonl"):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            found.setdefault((path.stem, row["point"]), set()).add(row["digest"])
    return found


def pauses(folder: Path) -> tuple[list[float], float | None]:
    """The pauses after the kills, less a step, and the median step, in seconds."""
    times = {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in folder.glob("rank-*.jsonl")
    }
    spans = [(b[1] - a[1]) / 1e9 for rows in times.values() for a, b in pairwise(rows)]
    step = statistics.median(spans) if spans else None
    found = []
    for mark in folder.glob("struck-*"):
        at = int(mark.read_text())
        after = [[row[1] for row in rows if row[1] > at] for rows in times.values()]
        if all(after) and step is not None:
            found.append(max(min(each) for each in after) / 1e9 - at / 1e9 - step)
    return found, step


def gates() -> dict[str, float]:
    """Time the two kinds of gate with two plain NCCL ranks; microseconds per step over no gate."""
    port = str(20_000 + time.time_ns() % 10_000)
    ranks = []
    for rank in range(2):
        rendezvous = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, **TRANSPORT, **rendezvous, "LOCAL_RANK": "0", "NCCL_HOSTID": f"bench-{rank}"}
        words = [sys.executable, str(HERE / "gpu_worker.py"), "gates"]
        ranks.append(subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True))
    told = [process.communicate(timeout=150)[0] for process in ranks]
    measured: dict[str, float] = json.loads(told[0].strip().splitlines()[-1])
    return measured


def row_of(cell: Cell, outcome: Outcome, calm: Outcome, log: Path) -> dict[str, object]:
    """One row of the table; what went wrong is printed."""
    equal = outcome.code == 0 and outcome.digests == calm.digests and bool(calm.digests)
    equal = equal and outcome.happened == cell.faults
    fate = "bit-equal" if equal else f"NOT EQUAL (exit {outcome.code}, {outcome.happened} happened)"
    told = f"{cell.layout:5} {cell.name:34} {fate:18}"
    print(told + " ".join(f"{pause:.3f} s" for pause in outcome.pauses), file=sys.stderr, flush=True)
    if not equal:
        print(outcome.output, file=sys.stderr, flush=True)
    with log.open("a") as out:
        print(f"==== {told}\n{outcome.output}", file=out)
    return {
        "layout": cell.layout,
        "fault": cell.name,
        "equal": equal,
        "code": outcome.code,
        "faults": outcome.happened,
        "points": len(calm.digests),
        "pauses_s": [round(pause, 4) for pause in outcome.pauses],
    }


def measure(work: Path, layouts: Sequence[str], log: Path) -> tuple[list[dict[str, object]], Mapping[str, Outcome]]:
    """All cells, one after the other."""
    rows, calm = [], {}
    for layout in layouts:
        progress(f"{layout}: undisturbed")
        calm[layout] = run(work, Cell(layout, "undisturbed", spares=0))
        if calm[layout].code != 0:
            print(calm[layout].output, file=sys.stderr)
        for cell in cells_of(layout):
            progress(f"{layout}: {cell.name}")
            rows.append(row_of(cell, run(work, cell), calm[layout], log))
    return rows, calm


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", default="ddp,hsdp", help="of ddp, hsdp; by commas")
    parser.add_argument("--out", type=Path, default=Path("."), help="where gpu.log goes")
    parser.add_argument("--cpu", action="store_true", help="try the bench itself, with Gloo")
    options = parser.parse_args()
    layouts = options.layouts.split(",")
    if not set(layouts) <= set(RANKS):
        parser.error(f"--layouts {options.layouts}: name some of {', '.join(RANKS)}")
    name = gpu()
    if not options.cpu and not name:
        print("not run: no CUDA device here", file=sys.stderr)
        return NOT_RUN
    options.out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="torchrelay-gpu-"))
    try:
        rows, calm = measure(work, layouts, options.out / "gpu.log")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    equal = all(row["equal"] for row in rows)
    found = [pause for row in rows for pause in row["pauses_s"]]  # type: ignore[attr-defined]
    figures: dict[str, object] = {"bit_equal": equal, "gpu_pause_p50_s": statistics.median(found) if found else None}
    figures |= {f"step_{layout}_s": calm[layout].step_s for layout in layouts}
    figures |= {} if options.cpu else gates()
    finish("gpu", figures, rows=rows, gpu=name or None)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
