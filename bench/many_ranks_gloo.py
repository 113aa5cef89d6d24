"""What a new Gloo group of so many ranks costs each of them, by plain PyTorch: every reconfigure makes one.

python bench/many_ranks_gloo.py RANKS     CPU milliseconds of a rank: mean of the ranks, median of some groups
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
from statistics import mean, median

import torch
import torch.distributed as dist

GROUPS = 5


def cpu_ms() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return 1000 * (used.ru_utime + used.ru_stime)


def make_groups(rank: int, ranks: int, store: str) -> list[float]:
    """What each of some groups has cost this rank, until all have connected."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    found = []
    for _ in range(GROUPS):
        dist.barrier()
        before = cpu_ms()
        dist.new_group(backend="gloo")
        found.append(cpu_ms() - before)
    dist.barrier()
    return found


def main() -> None:
    ranks = int(sys.argv[1])
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                costs = make_groups(rank, ranks, f"{folder}/store")
                os.write(writing, (" ".join(map(str, costs)) + "\n").encode())
                os._exit(0)
            children.append(child)
        codes = [os.waitpid(child, 0)[1] for child in children]
    os.close(writing)
    with os.fdopen(reading) as told:
        rows = [[float(word) for word in line.split()] for line in told]
    if any(codes) or len(rows) != ranks:
        sys.exit("a rank has failed")
    print(median(mean(costs) for costs in zip(*rows, strict=True)))


if __name__ == "__main__":
    main()
