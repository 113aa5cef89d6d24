"""Values of all kinds that a trainer changes once, in step 14: long after the first looks.

MODE  between  between two steps
      within   in the step, before the gate of step 14
"""

import collections
import dataclasses
import enum
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import MODE, Pairs, net, note, note_end, pace, strike


class Phase(enum.Enum):
    WARM = 1
    MAIN = 2


class Best(NamedTuple):
    step: int
    loss: float


@dataclasses.dataclass(frozen=True)
class Frozen:
    rate: float = 0.1


@dataclasses.dataclass
class Settings:
    rate: float = 0.1
    phase: Phase = Phase.WARM


class Trainer:
    def __init__(self):
        self.phase, self.best, self.frozen, self.settings = Phase.WARM, Best(0, 9.0), Frozen(), Settings()
        self.counted = collections.Counter(bad=0)
        self.ordered = collections.OrderedDict(a=1)
        self.default = collections.defaultdict(int, ok=0)
        self.nested = {"a": [0], "b": {"c": 1}}
        self.rows = [[1, 2], [3, 4]]
        self.phases = [Phase.WARM, Phase.WARM]
        self.named = {"x": Best(0, 0.0)}
        self.weights = np.ones(4)
        self.long = list(range(300))

    def change(self):
        self.phase, self.best, self.frozen = Phase.MAIN, Best(14, 0.5), dataclasses.replace(self.frozen, rate=0.2)
        self.settings = dataclasses.replace(self.settings, rate=0.3, phase=Phase.MAIN)
        self.counted["bad"] += 1
        self.ordered["b"] = 2
        self.default["new"] = 5
        self.nested["a"][0], self.nested["b"]["c"] = 7, 8
        self.rows[1].append(5)
        self.phases[1] = Phase.MAIN
        self.named["x"] = Best(1, 1.0)
        self.weights[2] = 3.0
        self.long[150] += 1

    def told(self):
        held = {**vars(self), "weights": self.weights.tolist()}
        return {name: repr(value) for name, value in held.items()}

    def scale(self):
        given = self.phase.value + self.best.loss + self.frozen.rate + self.settings.rate + self.counted["bad"]
        given += len(self.ordered) + self.default["new"] + self.nested["a"][0] + self.nested["b"]["c"]
        given += sum(self.rows[1]) + self.phases[1].value + self.named["x"].loss + float(self.weights.sum())
        return 0.01 * (given + self.long[150] / 100)


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
    trainer = Trainer()

    @run.step
    def step(batch):
        if MODE == "within" and run.global_step == 13:
            trainer.change()
        optimizer.zero_grad()
        loss = trainer.scale() * ((model(batch[0]) - batch[1]) ** 2).mean()
        loss.backward()
        strike("grad", run.global_step + 1, rank)
        mean = loss.detach() / world
        dist.all_reduce(mean)
        optimizer.step()
        return mean

    for epoch in run.epochs(2):
        sampler.set_epoch(epoch)
        for batch in run.batches(loader):
            loss = step(batch)
            if MODE == "between" and run.global_step == 14:
                trainer.change()
            note(rank, run.global_step, loss=loss, **trainer.told())
            pace(run.global_step)
            strike("after", run.global_step, rank)
    note_end(rank, model.module)
    run.atomic(dist.barrier)


if __name__ == "__main__":
    main()
