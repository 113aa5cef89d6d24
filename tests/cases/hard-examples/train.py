"""Draws hard examples more often: the last loss of each is kept in a variable, and weighs the next epoch's draw."""

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

import torchrelay
from casework import Pairs, net, note, note_end, pace, strike

SIZE = 200


class Weighted(Sampler):
    def __init__(self, rank):
        self.loss, self.epoch, self.rank = np.ones(SIZE), 0, rank

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 40

    def __iter__(self):
        source = np.random.default_rng(self.epoch * 10 + self.rank)
        return iter(source.choice(SIZE, 40, p=self.loss / self.loss.sum()).tolist())


class Indexed(Dataset):
    def __init__(self):
        self.base = Pairs(SIZE)

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return (*self.base[index], index)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sampler = Weighted(rank)
    loader = DataLoader(Indexed(), 4, sampler=sampler)
    run = torchrelay.protect(model=model, optimizer=optimizer)

    @run.step
    def step(batch):
        optimizer.zero_grad()
        each = ((model(batch[0]) - batch[1]) ** 2)[:, 0]
        each.mean().backward()
        strike("grad", run.global_step + 1, rank)
        optimizer.step()
        return each.detach()

    losses = {}
    for epoch in run.epochs(4):
        sampler.set_epoch(epoch)
        for index, loss in losses.items():
            sampler.loss[index] = loss
        for batch in run.batches(loader):
            each = step(batch)
            losses.update(zip(batch[2].tolist(), each.tolist(), strict=True))
            note(rank, run.global_step, loss=each.mean())
            pace(run.global_step)
    note_end(rank, model.module)
    run.atomic(dist.barrier)


main()
