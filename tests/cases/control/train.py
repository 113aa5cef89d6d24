"""A script as it should be: what is asked of all others is true of it."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import Pairs, net, note_end, strike, train


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = Pairs(160)
    sampler = DistributedSampler(data, seed=5)
    loader = DataLoader(data, 4, sampler=sampler)
    run = torchrelay.protect(model=model, optimizer=optimizer)

    @run.step
    def step(batch):
        optimizer.zero_grad()
        loss = ((model(batch[0]) - batch[1]) ** 2).mean()
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
