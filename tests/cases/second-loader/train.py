"""Two loaders: one is tracked, and items of the other are taken beside it.

MODE beside: an iterator that lives through the loop; within: gone through whole within an item, which is allowed.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import MODE, Pairs, net, note, note_end, pace, strike


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = Pairs(80)
    sampler = DistributedSampler(data, seed=5)
    loader = DataLoader(data, 4, sampler=sampler)
    second = DataLoader(Pairs(80), 4, shuffle=True, generator=torch.Generator().manual_seed(3))
    others = iter(second)
    run = torchrelay.protect(model=model, optimizer=optimizer)

    @run.step
    def step(batch, other):
        optimizer.zero_grad()
        loss = ((model(batch[0]) - batch[1]) ** 2).mean() + 0.1 * model(other).mean()
        loss.backward()
        strike("grad", run.global_step + 1, rank)
        mean = loss.detach() / world
        dist.all_reduce(mean)
        optimizer.step()
        return mean

    for epoch in run.epochs(2):
        sampler.set_epoch(epoch)
        for batch in run.batches(loader):
            within = (items[0] for items in DataLoader(Pairs(8), 4))
            other = next(others)[0] if MODE == "beside" else torch.cat(list(within))
            loss = step(batch, other)
            note(rank, run.global_step, epoch=epoch, loss=loss)
            pace(run.global_step)
    note_end(rank, model.module)
    run.atomic(dist.barrier)


if __name__ == "__main__":
    main()
