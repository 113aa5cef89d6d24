"""GPU: two NCCL ranks and a spare on one device. Recovery from SIGKILL in backward, and two kinds of gate, timed.

    make bench NAME=gpu

Needs one CUDA device; without one it says so and ends with 77 (not run). Each rank passes for a host of its own
(NCCL_HOSTID), because NCCL refuses two ranks of one host on one device. Takes a few minutes.

bit_equal          every rank at every point, against an undisturbed run in fresh processes
gpu_pause_p50_s    kill to the next committed step of the last rank, less one undisturbed step
gate_host_us       what a step takes longer when the host waits for the gate before it queues the update
gate_device_us     the same when a fused optimizer is guarded on the device (the gate's result as its `found_inf`)
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from figures import finish, progress

HERE = Path(__file__).parent
NOT_RUN = 77
RECIPE = {
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
    "NCCL_SOCKET_IFNAME": "lo",
    # The watchdog must not act before our abort does.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


def have_gpu() -> bool:
    """Asked in a process of its own, so that this one holds no CUDA context."""
    probe = "import torch, sys; sys.exit(0 if torch.cuda.is_available() else 1)"
    return subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0


def run_job(work: Path, name: str, steps: int, kills: int) -> tuple[int, Path]:
    """One job of two ranks; with kills, each in backward of a step that is noted in the times."""
    folder = work / name
    folder.mkdir()
    words = [
        sys.executable,
        "-m",
        "torchrelay.cli.main",
        "run",
        "--nproc-per-node",
        "2",
        "--run-dir",
        str(folder / "run"),
    ]
    words += ["--spares", "1" if kills else "0", "--slot-faults", "0", str(HERE / "gpu_worker.py"), "train"]
    words += ["--steps", str(steps), "--folder", str(folder), "--kills", str(kills)]
    environment = {**os.environ, **RECIPE, "TORCHRELAY_DIGESTS": str(folder / "digests")}
    (folder / "digests").mkdir()
    with (folder / "out").open("w") as out:
        code = subprocess.run(words, env=environment, stdout=out, stderr=out, timeout=200, check=False).returncode
    if code:
        print((folder / "out").read_text()[-4000:], file=sys.stderr)
    return code, folder


def digests(folder: Path) -> dict[tuple[str, str], set[str]]:
    found: dict[tuple[str, str], set[str]] = {}
    for path in (folder / "digests").glob("rank-*.jsonl"):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            found.setdefault((path.stem, row["point"]), set()).add(row["digest"])
    return found


def pauses(folder: Path) -> tuple[list[float], float]:
    """The pauses after the kills and the median step, in seconds."""
    times = {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in folder.glob("rank-*.jsonl")
    }
    spans = [(b[1] - a[1]) / 1e9 for rows in times.values() for a, b in pairwise(rows)]
    step = statistics.median(spans)
    found = []
    for mark in folder.glob("killed-*"):
        at = int(mark.read_text())
        found.append(max(min(row[1] for row in rows if row[1] > at) for rows in times.values()) / 1e9 - at / 1e9)
    return found, step


def gates() -> dict[str, float]:
    """Time the two kinds of gate with two plain NCCL ranks; microseconds per step over no gate."""
    port = str(20_000 + time.time_ns() % 10_000)
    ranks = []
    for rank in range(2):
        environment = {
            **os.environ, **RECIPE, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port, "NCCL_HOSTID": f"bench-{rank}",
        }  # fmt: skip
        words = [sys.executable, str(HERE / "gpu_worker.py"), "gates"]
        ranks.append(subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True))
    told = [process.communicate(timeout=150)[0] for process in ranks]
    measured: dict[str, float] = json.loads(told[0].strip().splitlines()[-1])
    return measured


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kills", type=int, default=4)
    options = parser.parse_args()
    if not have_gpu():
        print("not run: no CUDA device here", file=sys.stderr)
        return NOT_RUN
    work = Path(tempfile.mkdtemp(prefix="torchrelay-gpu-"))
    try:
        progress("undisturbed run")
        calm_code, calm = run_job(work, "calm", options.steps, 0)
        progress("run with kills")
        code, disturbed = run_job(work, "disturbed", options.steps, options.kills)
        found, step = pauses(disturbed)
        equal = calm_code == code == 0 and digests(calm) == digests(disturbed) and bool(digests(calm))
        figures: dict[str, object] = {"bit_equal": equal, "kills": len(found), "step_s": step}
        figures["gpu_pause_p50_s"] = statistics.median(found) - step if found else None
        figures |= gates()
        finish("gpu", figures)
        return 0 if equal and len(found) == options.kills else 1
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
