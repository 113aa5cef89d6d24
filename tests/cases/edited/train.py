"""A project of several files, which somebody edits while it trains. Each file has a factor of the loss, or of the data.

MODE=spawn: its loader has workers that are spawned, and begin from the files.
"""

import factors
import pairs
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import MODE, net, note_end, strike, train

FACTOR = 1.0


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = pairs.Scaled(160)
    sampler = DistributedSampler(data, seed=5)
    spawned = {"num_workers": 1, "multiprocessing_context": "spawn"} if MODE == "spawn" else {}
    loader = DataLoader(data, 4, sampler=sampler, **spawned)
    run = torchrelay.protect(model=model, optimizer=optimizer)

    @run.step
    def step(batch):
        factor = FACTOR * factors.FACTOR
        if run.global_step >= 10:
            from parts import late  # a replacement of a later step imports it after all others

            factor *= late.FACTOR
        optimizer.zero_grad()
        loss = factor * ((model(batch[0]) - batch[1]) ** 2).mean()
        loss.backward()
        strike("grad", run.global_step + 1, rank)
        mean = loss.detach() / world
        dist.all_reduce(mean)
        optimizer.step()
        return mean

    train(run, step, loader, epochs=2, rank=rank, before=sampler.set_epoch)
    note_end(rank, model.module)
    run.atomic(dist.barrier)


if __name__ == "__main__":
    main()
