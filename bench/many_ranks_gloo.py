"""What a Gloo group of so many ranks costs each of them, by plain PyTorch, as every reconfigure needs one: it is made
through a TCP store, sums once, and is let go of.

python bench/many_ranks_gloo.py RANKS     CPU milliseconds of a rank: mean of the ranks, median of some groups
"""

from __future__ import annotations

import os
import resource
import socket
import sys
from datetime import timedelta
from statistics import mean, median

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

GROUPS = 5


def cpu_ms() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return 1000 * (used.ru_utime + used.ru_stime)


def make_groups(rank: int, ranks: int, port: int) -> list[float]:
    """What each of some groups has cost this rank, from its beginning to its end."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, ranks, rank == 0, timeout=timedelta(seconds=120))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    found = []
    for _ in range(GROUPS):
        dist.barrier()
        before = cpu_ms()
        group = dist.new_group(backend="gloo")
        dist.all_reduce(torch.ones(1), group=group)
        dist.destroy_process_group(group)
        found.append(cpu_ms() - before)
    dist.barrier()
    return found


def main() -> None:
    ranks = int(sys.argv[1])
    reading, writing = os.pipe()
    children = []
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            costs = make_groups(rank, ranks, port)
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
