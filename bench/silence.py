"""Silence: how soon a power cut is found, and that nobody is called lost while all cores are busy with something else.

    make bench NAME=silence ARGS="--cuts 5 --minutes 10"

A node's link is cut in the middle of training (`torchrelay run --isolate`: root); then, in another run, 4 ranks on 2
nodes train while as many processes as there are cores use all the time they get.

detection_s     from the cut until the node is lost, median; detection_max_s: the longest
limit_s         the silence that loses a node, as the orchestrator had it when the link was cut (it counts from the last
                beat, half a second before the cut at most, and is looked at twice a second)
false_alarms    incidents and lost nodes under load; there should be none
gap_s           the longest gap between two beats of a node under load; loaded_limit_s: the longest limit in force
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from figures import finish, progress
from torchrelay.api.shown import NodeStatus, Status
from torchrelay.client.client import Away, Client, Denied
from torchrelay.schedulers.local import read_file
from torchrelay.schedulers.network import RECORD, Network, cut, obstacle

HERE = Path(__file__).parent
WARM_STEPS = 20
START_S = 180.0
LOST_S = 60.0
LOOK_S = 0.02
TELL_S = 30.0
STEPS = 1_000_000


@dataclass
class Run:
    """A training run."""

    run_dir: Path
    process: subprocess.Popen[bytes]

    def status(self) -> Status | None:
        try:
            return Client.of(self.run_dir).view_status()
        except (Away, Denied):
            return None

    def step(self) -> int:
        status = self.status()
        return -1 if status is None or not status.jobs or status.jobs[-1].step is None else status.jobs[-1].step

    def node(self, name: str) -> NodeStatus | None:
        status = self.status()
        return None if status is None else next((one for one in status.nodes if one.node == name), None)

    def await_training(self) -> None:
        until = time.monotonic() + START_S
        while self.step() < WARM_STEPS:
            if time.monotonic() > until or self.process.poll() is not None:
                raise SystemExit(f"no training within {START_S:g} s: see {self.run_dir}")
            time.sleep(0.2)


@contextmanager
def training(*flags: str) -> Iterator[Run]:
    """4 ranks on 2 nodes, from their first steps on."""
    work = Path(tempfile.mkdtemp(prefix="torchrelay-bench-"))
    words = [sys.executable, "-m", "torchrelay.cli.main", "run", "--nodes", "2", "--nproc-per-node", "2", "--quiet"]
    words += ["--run-dir", str(work / "run"), *flags, str(HERE.parent / "tests" / "scripts" / "faulty.py")]
    words += ["--steps", str(STEPS), "--pace", "0.1"]
    with (work / "out").open("wb") as out:
        process = subprocess.Popen(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=out, stderr=out)
    run = Run(work / "run", process)
    try:
        run.await_training()
        yield run
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(work, ignore_errors=True)


# ---------------------------------------------------------------- a power cut


def detect() -> tuple[float, float]:
    """Seconds from a cut until the node is lost, and the limit in force."""
    with training("--isolate") as run:
        network = read_file(run.run_dir / RECORD, Network)
        node = run.node("node-1")
        if network is None or node is None or node.limit_ms is None:
            raise SystemExit(f"the run has no network, or node-1 is not heard: see {run.run_dir}")
        begin = time.monotonic()
        cut(network, node.node)
        while time.monotonic() - begin < LOST_S:
            seen = run.node("node-1")
            if seen is not None and not seen.alive:
                return time.monotonic() - begin, node.limit_ms / 1000
            time.sleep(LOOK_S)
    raise SystemExit(f"node-1 was not lost within {LOST_S:g} s")


# ---------------------------------------------------------------- load


def burn() -> None:
    """Use a core, as much of it as there is."""
    number = 1
    while True:
        number = (number * 6364136223846793005 + 1) % 2**64


@contextmanager
def load() -> Iterator[None]:
    processes = [multiprocessing.Process(target=burn, daemon=True) for _ in range(os.cpu_count() or 1)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
            process.join()


@dataclass
class Watch:
    """What was seen under load."""

    steps: int = 0
    gap_ms: int = 0
    limit_ms: int = 0
    lost: int = 0
    incidents: Sequence[object] = ()


def endure(minutes: float) -> Watch:
    """Train under load, and look."""
    watch = Watch()
    with training() as run, load():
        first, told = run.step(), time.monotonic()
        until = time.monotonic() + 60 * minutes
        while time.monotonic() < until and run.process.poll() is None:
            time.sleep(1.0)
            status = run.status()
            for node in status.nodes if status is not None else ():
                watch.gap_ms = max(watch.gap_ms, node.gap_ms or 0)
                watch.limit_ms = max(watch.limit_ms, node.limit_ms or 0)
                watch.lost += not node.alive
            left = (until - time.monotonic()) / 60
            if time.monotonic() >= told + TELL_S:
                told = time.monotonic()
                progress(f"{left:.1f} minutes left: gap {watch.gap_ms / 1000:.2f} s, {watch.lost} lost")
        watch.steps = run.step() - first
        watch.incidents = [one for one in Client.of(run.run_dir).incidents()]
    return watch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=int, default=5, help="power cuts, each in a run of its own (0: none)")
    parser.add_argument("--minutes", type=float, default=10.0, help="of training under load (0: none)")
    options = parser.parse_args()
    figures: dict[str, object] = {}
    more: dict[str, object] = {}
    if options.cuts and obstacle():
        progress(f"no power cuts: {obstacle()}")
    elif options.cuts:
        found = []
        for number in range(options.cuts):
            found.append(detect())
            progress(f"cut {number + 1} of {options.cuts}: lost after {found[-1][0]:.2f} s, limit {found[-1][1]:g} s")
        times = [took for took, _ in found]
        figures |= {
            "cuts": len(times),
            "detection_s": median(times),
            "detection_max_s": max(times),
            "limit_s": max(limit for _, limit in found),
        }
        more["detections_s"] = [round(took, 3) for took in times]
    wrong = 0
    if options.minutes:
        watch = endure(options.minutes)
        wrong = len(watch.incidents) + watch.lost
        figures |= {
            "false_alarms": wrong,
            "minutes": options.minutes,
            "steps": watch.steps,
            "gap_s": watch.gap_ms / 1000,
            "loaded_limit_s": watch.limit_ms / 1000,
        }
        more["incidents"] = json.loads(json.dumps(watch.incidents, default=str))
    finish("silence", figures, **more)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
