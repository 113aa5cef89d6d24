"""Steps count in objects that classes keep, in dicts by keys of all kinds, and in numbers hung on torch's objects."""

import enum

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import Pairs, note, note_end, pace, strike


class Colour(enum.Enum):
    RED = 1


class Counted:
    def __init__(self):
        self.count = 0


class Single:
    """Made when it is asked for."""

    only = None

    @classmethod
    def get(cls):
        if cls.only is None:
            cls.only = Counted()
        return cls.only


class New:
    """The same, by the class itself."""

    _there = None

    def __new__(cls):
        if cls._there is None:
            cls._there = super().__new__(cls)
            cls._there.count = 0
        return cls._there


class Holder:
    shared = Counted()
    by_name = {"a": Counted()}  # noqa: RUF012  as people write it


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, inputs):
        return self.last(torch.tanh(self.first(inputs)))


pairs = {(0, "train"): Counted()}
members = {Colour.RED: Counted()}
draws = torch.quasirandom.SobolEngine(1, scramble=True, seed=4)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    net = Net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.seen = optimizer.seen = net.first.weight.seen = 0
    data = Pairs(160)
    sampler = DistributedSampler(data, seed=5)
    loader = DataLoader(data, 4, sampler=sampler)
    run = torchrelay.protect(model=model, optimizer=optimizer)

    def counted():
        held = (Single.get(), New(), Holder.shared, Holder.by_name["a"], pairs[(0, "train")], members[Colour.RED])
        for each in held:
            each.count += 1
        for each in (model, optimizer, net.first.weight):
            each.seen += 1
        counts = [each.count for each in held] + [each.seen for each in (model, optimizer, net.first.weight)]
        return counts, draws.draw(1).item()

    @run.step
    def step(batch):
        optimizer.zero_grad()
        counts, drawn = counted()
        loss = (1 + 0.001 * sum(counts) + drawn) * ((model(batch[0]) - batch[1]) ** 2).mean()
        loss.backward()
        strike("grad", run.global_step + 1, rank)
        mean = loss.detach() / world
        dist.all_reduce(mean)
        optimizer.step()
        return mean, counts

    for epoch in run.epochs(2):
        sampler.set_epoch(epoch)
        for batch in run.batches(loader):
            loss, counts = step(batch)
            note(rank, run.global_step, loss=loss, counts=counts)
            pace(run.global_step)
            strike("after", run.global_step, rank)
    note_end(rank, net)
    run.atomic(dist.barrier)


if __name__ == "__main__":
    main()
