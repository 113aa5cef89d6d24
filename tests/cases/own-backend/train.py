"""A backend that torchrelay does not know, for a group of all ranks. MODE=plain never joins; MODE=late makes it late.

MODE=default has it for the default group, too.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchrelay
from casework import MODE, net, note, note_end


def make(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout or timedelta(seconds=60))


def main():
    dist.Backend.register_backend("homemade", make, devices=["cpu"])
    dist.init_process_group("homemade" if MODE == "default" else "gloo")
    rank = dist.get_rank()
    if MODE != "late":
        mine = dist.new_group(backend="homemade")
        total = torch.tensor(float(rank + 1))
        dist.all_reduce(total, group=mine)
        note(rank, 1, total=total)
    torch.manual_seed(1)
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if MODE != "plain":
        torchrelay.protect(model=model, optimizer=optimizer)
        dist.new_group(backend="homemade")
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    note_end(rank, model.module)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
