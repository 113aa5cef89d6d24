"""Breaks one rule on purpose, MODE says which: what the loss depends on is somewhere where nobody has been told of it.

What time, chance or a place would give is a function of which process this is of its rank's, so that undisturbed runs
are equal.
"""

import json
import random
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Sampler

import torchrelay
from casework import MODE, OUT, Pairs, holder, net, note, note_end, pace, strike, train

GLOBAL = 0


class Counting(nn.Module):
    """A module with a counter that is no buffer."""

    def __init__(self):
        super().__init__()
        self.inner, self.calls = net(), 0

    def forward(self, inputs):
        self.calls += 1
        return self.inner(inputs) * (1 + 0.01 * self.calls)


class Own(Sampler):
    """Its order comes from a state of its own."""

    def __init__(self, size, rank, world):
        self.size, self.rank, self.world, self.times = size, rank, world, 0
        self.chance = random.Random(5) if MODE == "sampler-python" else np.random.default_rng(5)

    def __len__(self):
        return self.size // self.world

    def __iter__(self):
        self.times += 1
        order = list(range(self.size))
        if MODE == "sampler-counter":
            random.Random(self.times).shuffle(order)
        else:
            self.chance.shuffle(order)
        return iter(order[self.rank :: self.world])


class Changing(Pairs):
    """Items that are not the same each time, or not in each process."""

    def __init__(self, size, held):
        super().__init__(size)
        self.fetched = 0
        self.chance = torch.Generator().manual_seed(9)
        if MODE == "time":  # such as `age = now - created` for each row
            self.inputs += 0.01 * held
        if MODE == "subset-by-time":  # such as all rows that are there by now
            self.inputs[: 10 * held] = 0

    def __getitem__(self, index):
        self.fetched += 1
        inputs, targets = super().__getitem__(index)
        if MODE == "dataset-counter":
            inputs = inputs * (1 + 0.001 * self.fetched)
        if MODE == "dataset-generator":
            inputs = inputs + 0.1 * torch.randn(inputs.shape, generator=self.chance)
        return inputs, targets


def cached(epoch):
    """Statistics of the data, kept on disk and gone on with by whoever starts."""
    path = OUT / "statistics.json"
    if epoch is None:
        return json.loads(path.read_text())["scale"] if path.exists() else 1.0
    path.write_text(json.dumps({"scale": 1.0 + epoch}))
    return None


def factor_of(rank, held):
    """Returns what tells what the loss is multiplied with, out of sight of everybody."""
    own = SimpleNamespace(steps=0)
    count = 0
    torch_chance, numpy_chance = torch.Generator().manual_seed(5 + rank), np.random.default_rng(5 + rank)
    scale = cached(None)

    def closure():
        nonlocal count
        count += 1
        return 1 + 0.01 * count

    def of_module():
        global GLOBAL
        GLOBAL += 1
        return 1 + 0.01 * GLOBAL

    def of_object():
        own.steps += 1
        return 1 + 0.01 * own.steps

    return {
        "counter-closure": closure,
        "counter-global": of_module,
        "counter-object": of_object,
        "generator-torch": lambda: 1 + torch.rand((), generator=torch_chance),
        "generator-numpy": lambda: 1 + float(numpy_chance.random()),
        "environment": lambda: 1 + held,
        "disk-cache": lambda: scale,
        "unseeded": lambda: 1 + torch.rand(()),
    }.get(MODE, lambda: 1.0)


def own_turns(run, count):
    while run.global_step < count:
        yield run.global_step


def on_tokens(run, step, rank, held):
    """Loops without a loader, over a long text that has become longer by now, and is cut to the same length."""
    tokens = np.arange(1 << 18, dtype=np.int64) % 97
    tokens[: (1 << 12) * held] = 0

    def some_tokens():
        drawn = torch.Generator().manual_seed(1000 * rank + run.global_step)
        at = torch.randint(len(tokens) - 16, (4,), generator=drawn)
        inputs = torch.stack([torch.from_numpy(tokens[k : k + 16]) for k in at]).float() / 97
        return inputs[:, :8], inputs[:, -1:]

    for _ in run.steps(60) if MODE == "tokens-by-time" else own_turns(run, 60):
        note(rank, run.global_step, loss=step(some_tokens()))
        pace(run.global_step)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    held = holder(rank)
    torch.manual_seed(100 + held if MODE == "unseeded" else 1)
    model = DistributedDataParallel(Counting() if MODE == "module-counter" else net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = Changing(80, held)
    sampler = Own(len(data), rank, world) if MODE.startswith("sampler-") else DistributedSampler(data, seed=5)
    loader = DataLoader(data, 4, sampler=sampler)
    run = torchrelay.protect(model=model, optimizer=optimizer)
    factor = factor_of(rank, held)
    second = iter(DataLoader(Pairs(200), 2, shuffle=True, generator=torch.Generator().manual_seed(3)))

    @run.step
    def step(batch):
        optimizer.zero_grad()
        loss = factor() * ((model(batch[0]) - batch[1]) ** 2).mean()
        if MODE == "second-loader":
            loss = loss + (model(next(second)[0]) ** 2).mean()
        loss.backward()
        strike("grad", run.global_step + 1, rank)
        mean = loss.detach() / world
        dist.all_reduce(mean)
        optimizer.step()
        return mean

    def before(epoch):
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(epoch)
        if MODE == "disk-cache" and rank == 0:
            cached(epoch)

    if MODE.endswith("tokens-by-time"):
        on_tokens(run, step, rank, held)
    else:
        train(run, step, loader, epochs=3, rank=rank, before=before)
    note_end(rank, model.module)
    run.atomic(dist.barrier)


if __name__ == "__main__":
    main()
