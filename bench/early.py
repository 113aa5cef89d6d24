"""Early: what it costs to compare supposed replicas, as is done in four of the first steps of a run.

    make bench NAME=early

early_sums_ms       the sums of all trained tensors of a plain model of so many parameters, on one core
early_compare_ms    telling them to one another, over 4 Gloo ranks: each time, also of those that have none to tell
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path

from figures import finish, progress

RANKS = 4
WIDTH = 1024


def measure(rank: int, port: int, millions: int, rounds: int, out: Path) -> None:
    """One rank; the first writes what it has measured."""
    import torch
    import torch.distributed as dist

    from torchrelay.protocol.messages.ids import Point
    from torchrelay.worker.agreement.comparing import Early
    from torchrelay.worker.state.state import State

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    torch.manual_seed(1)
    layers = max(1, round(millions * 1e6 / WIDTH**2))
    model = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
    early = Early(State(model), "all")
    sums_s, compare_s = [], []
    for _ in range(rounds):
        dist.barrier()
        begin = time.perf_counter()
        values = early.values()
        between = time.perf_counter()
        dist.barrier()
        met = time.perf_counter()
        early.compare(values, Point(2))
        sums_s.append(between - begin)
        compare_s.append(time.perf_counter() - met)
    if rank == 0:
        out.write_text(f"{statistics.median(sums_s)} {statistics.median(compare_s)}")
    dist.destroy_process_group()


def main() -> None:
    spawn = multiprocessing.get_context("spawn")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=4, help="of parameters")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        out = Path(folder) / "measured"
        progress(f"{RANKS} ranks, {options.millions} M parameters each")
        ranks = [
            spawn.Process(target=measure, args=(rank, port, options.millions, options.rounds, out))
            for rank in range(RANKS)
        ]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        sums_s, compare_s = map(float, out.read_text().split())
    figures = {"early_sums_ms": 1000 * sums_s, "early_compare_ms": 1000 * compare_s}
    finish("early", figures, millions=options.millions, ranks=RANKS, rounds=options.rounds)


if __name__ == "__main__":
    main()
