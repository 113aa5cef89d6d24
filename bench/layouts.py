"""Layouts: SIGKILL of one rank in backward, in each layout; 4 M parameters, 4 ranks, warm spares.

    make bench NAME=layouts

<layout>_unplanned_pause_p50_s   kill to the next committed step of the last rank, less one undisturbed step
<layout>_phases_p50_ms           where the ledger says that the time went

ddp        plain DDP
hsdp       FSDP2 over 2 x 2 ranks: replicas of shards
tp_dp      2 ranks share each layer, and there are two such pairs (by FSDP2, which shards nothing there)
tp_hsdp    the same with each pair's shards split once more: 8 ranks, as 4 have no room for a replica
fsdp       no rank's shard has a replica: all begin again from snapshots (fsdp_steps_again_p50 steps before), and the
           pause ends with the first of those; and a planned move, its pause from halt to resumption less one step
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from figures import finish, progress
from migration import Moving, one_move
from recovery import Kill, command, prepare, settled, stop
from spread import LAYOUTS
from steps import read_times, step_time_s, wait_for
from torchrelay.client.client import Client
from torchrelay.protocol.model.incident import UNSETTLED

HERE = Path(__file__).parent
RANKS = {layout: 8 if layout == "tp-hsdp" else 4 for layout in LAYOUTS}
ALONE = ("fsdp",)  # no rank has a replica
LIMIT_S = 0.5


def phases_p50_ms(incidents: list[dict[str, Any]]) -> dict[str, float]:
    """The median time of each phase, in ms."""
    names = dict.fromkeys(name for one in incidents for name in one["phases"])
    return {name: statistics.median(one["phases"].get(name, 0) for one in incidents) for name in names}


def unplanned(work: Path, layout: str, kills: int) -> dict[str, object]:
    """The pauses of kills, one rank after the other, each with a warm spare."""
    kill = Kill(prepare(work), work / "times", RANKS[layout])
    run_dir = work / "run"
    words = command("torchrelay.cli.main", "run", "--nproc-per-node", str(RANKS[layout]), "--spares", "2")
    words += ["--slot-faults", "0", "--run-dir", str(run_dir), "--quiet", str(HERE / "workload.py")]
    words += ["--layout", layout, "--steps", "1000000", "--times", str(kill.times), "--kill", str(kill.folder)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    try:
        settled(kill, 10)
        client = Client.of(run_dir)
        pauses: list[float] = []
        for number in range(kills):
            wait_for("a warm spare", lambda: client.status()["spares"]["warm"] >= 1, 120)
            settled(kill, 20 if layout in ALONE else 5)  # beyond the steps that were made again
            at = kill.strike(number % RANKS[layout], deadline_s=60)
            pauses.append(
                after_snapshot(kill, client, number, at) if layout in ALONE else kill.next_step(at, deadline_s=120)
            )
            progress(f"{layout}: kill {number + 1} of {kills}: {pauses[-1]:.3f} s to the next step")
        step = step_time_s(read_times(kill.times))
        wait_for("the last incident's end", lambda: client.incidents()[-1]["resolution"] not in UNSETTLED, 60)
        incidents = client.incidents()
    finally:
        stop(process)
    wanted = "rolled back" if layout in ALONE else "clean"
    if (others := [one["summary"] for one in incidents if one["resolution"] != wanted]) or len(incidents) != kills:
        raise RuntimeError(f"{layout}: {len(incidents)} incidents for {kills} kills; not {wanted}: {others}")
    beyond = [pause - step for pause in pauses]
    name = layout.replace("-", "_")
    again = {f"{name}_steps_again_p50": statistics.median(one["lost"] for one in incidents)}
    return (again if layout in ALONE else {}) | {
        f"{name}_unplanned_pause_p50_s": statistics.median(beyond),
        f"{name}_unplanned_pause_max_s": max(beyond),
        f"{name}_step_s": step,
        f"{name}_phases_p50_ms": phases_p50_ms(incidents),
    }


def after_snapshot(kill: Kill, client: Client, number: int, at: int) -> float:
    """Seconds from `at` to the first step that every rank has made again. Replacements note the one before it, too."""

    def over() -> bool:
        found = client.incidents()
        return len(found) > number and found[number]["resolution"] not in UNSETTLED

    wait_for("the incident's end", over, 120)
    step = int(client.incidents()[number]["resume_point"].partition("+")[0]) + 1

    def made() -> list[int]:
        times = read_times(kill.times).values()
        found = [[row[1] for row in rows if row[0] == step and row[1] > at] for rows in times]
        return [each[0] for each in found if each]

    wait_for(f"step {step} of every rank", lambda: len(made()) == kill.ranks, 120)
    return (max(made()) - at) / 1e9


def planned(work: Path, layout: str, moves: int) -> dict[str, object]:
    """The same of planned moves: the longest gap between two commits, less one step."""
    kill = Kill(prepare(work), work / "times")
    job = Moving(work / "run", work / "times", "4m", layout=layout)
    job.start(kill.folder)
    try:
        settled(kill, 10)
        pauses: list[float] = []
        for number in range(moves):
            job.await_spares(1)
            settled(kill, 8)
            ranks = [number % RANKS[layout]]
            pauses.append(one_move(job, kill, number + 1, "/v1/jobs/{job}/migrate", ranks=ranks).pause_s)
            progress(f"{layout}: move {number + 1} of {moves}: {pauses[-1]:.3f} s beyond one step")
        incidents = Client.of(job.run_dir).incidents()
    finally:
        stop(job.process)
    return {
        f"{layout}_planned_pause_p50_s": statistics.median(pauses),
        f"{layout}_planned_pause_max_s": max(pauses),
        f"{layout}_planned_phases_p50_ms": phases_p50_ms(incidents),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="or moves, in each layout")
    parser.add_argument("--layout", choices=LAYOUTS, action="append", help="this one alone; may be given again")
    parser.add_argument("--short", action="store_true", help="three kills in each layout")
    options = parser.parse_args()
    kills = 3 if options.short else options.kills
    work = Path(tempfile.mkdtemp(prefix="torchrelay-bench-"))
    figures: dict[str, object] = {}
    try:
        for layout in options.layout or LAYOUTS:
            figures |= unplanned(work / layout, layout, kills)
            if layout in ALONE:
                figures |= planned(work / f"{layout}-planned", layout, kills)
        finish("layouts", figures, kills=kills, limit_s=LIMIT_S)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
