"""State that a script keeps in plain attributes: each decides about numbers, and nobody was told of it.

Counters and a generator of a module, a generator that the step function has from around it, a counter of an object in
extra that its state_dict does not tell, one of a dataset, and a sampler used for evaluations inside sections.
"""

import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Sampler

import torchrelay
from casework import Pairs, net, note, note_end, pace, strike

anywhere = np.random.default_rng(11)


class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = net()
        self.calls = 0
        self.noise = random.Random(3)

    def forward(self, inputs):
        self.calls += 1
        return self.inner(inputs) * (1 + 0.01 * self.calls) + 0.01 * self.noise.random()


class Temperature:
    def __init__(self):
        self.value, self.updates = 1.0, 0

    def update(self):
        self.updates += 1
        self.value = 1.0 + 0.001 * self.updates**2

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Counting(Pairs):
    made = 0

    def __getitem__(self, index):
        self.made += 1
        inputs, targets = super().__getitem__(index)
        return inputs * (1 + 0.001 * self.made), targets


class Evaluated(Sampler):
    def __init__(self):
        self.times = 0

    def __len__(self):
        return 4

    def __iter__(self):
        self.times += 1
        return iter(np.random.default_rng(self.times).permutation(40)[:4].tolist())


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = DistributedDataParallel(Growing())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    temperature = Temperature()
    closed = torch.Generator().manual_seed(rank)
    data = Counting(64)
    sampler = DistributedSampler(data, seed=5)
    loader, others = DataLoader(data, 4, sampler=sampler), DataLoader(Pairs(40), 4, sampler=Evaluated())
    run = torchrelay.protect(model=model, optimizer=optimizer, state={"temperature": temperature})

    @run.step
    def step(batch):
        optimizer.zero_grad()
        noise = torch.rand(1, generator=closed) + anywhere.random()
        loss = ((model(batch[0]) - batch[1]) ** 2).mean() * temperature.value + 0.01 * noise.mean()
        loss.backward()
        strike("grad", run.global_step + 1, rank)
        mean = loss.detach() / world
        dist.all_reduce(mean)
        optimizer.step()
        return mean

    def evaluate():
        total = sum(float(batch[0].sum()) for batch in run.batches(others))
        strike("section", run.global_step, rank)
        summed = torch.tensor(total, dtype=torch.float64)
        dist.all_reduce(summed)
        return summed

    for epoch in run.epochs(3):
        sampler.set_epoch(epoch)
        note(rank, 1000 + epoch, score=run.atomic(evaluate))
        for batch in run.batches(loader):
            loss = step(batch)
            note(rank, run.global_step, epoch=epoch, loss=loss)
            temperature.update()
            pace(run.global_step)
            strike("after", run.global_step, rank)
    note_end(rank, model.module)
    run.atomic(dist.barrier)


if __name__ == "__main__":
    main()
