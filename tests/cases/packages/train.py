"""A script of several files: what changes is kept by a module that only another module of it imports.

MODE  inside   the step goes through it
      between  code between two steps does
"""

import engine
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import MODE, Pairs, net, note, note_end, pace, strike

maker = engine.Engine()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = Pairs(160)
    sampler = DistributedSampler(data, seed=5)
    loader = DataLoader(data, 4, sampler=sampler)
    run = torchrelay.protect(model=model, optimizer=optimizer)
    weight = 1.0

    @run.step
    def step(batch, given):
        optimizer.zero_grad()
        used = maker.weight() if MODE == "inside" else given
        loss = used * ((model(batch[0]) - batch[1]) ** 2).mean()
        loss.backward()
        strike("grad", run.global_step + 1, rank)
        mean = loss.detach() / world
        dist.all_reduce(mean)
        optimizer.step()
        return mean, used

    for epoch in run.epochs(2):
        sampler.set_epoch(epoch)
        for batch in run.batches(loader):
            loss, used = step(batch, weight)
            if MODE == "between":
                weight = maker.weight()
            held = engine.stats
            count = held.trackers["loss"].count
            note(rank, run.global_step, loss=loss, used=used, seen=held.seen, count=count, by=dict(held.by_name))
            pace(run.global_step)
            strike("after", run.global_step, rank)
    note_end(rank, model.module)
    run.atomic(dist.barrier)


if __name__ == "__main__":
    main()
