"""Changes the same things before optimizer.step() and after it, and reads them in the next step.

MODE: what it changes; "-late": after it only from some step on; "-cut": it begins in the very step that is cut.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import MODE, Pairs, net, note, note_end, pace, strike

LATE = 14


class Trainer:
    def __init__(self):
        self.count, self.rows, self.sums = 0, [0.0], torch.zeros(3)
        self.large = torch.zeros(1 << 16)

    def change(self, amount):
        what = MODE.partition("-")[0]
        if what == "count":
            self.count += amount
        elif what == "rows":
            self.rows = [*self.rows[-3:], self.rows[-1] + amount]
        elif what == "sums":
            self.sums += amount
        else:
            self.large += amount

    def weight(self):
        total = self.count + sum(self.rows) + float(self.sums.sum()) + float(self.large[0])
        return 1 + 1e-2 * (total % 7)

    def step(self, inputs, targets):
        now = run.global_step + 1
        if "cut" not in MODE or now >= LATE:
            self.change(1)
        optimizer.zero_grad()
        loss = ((model(inputs) - targets) ** 2).mean() * self.weight()
        loss.backward()
        strike("grad", now, rank)
        optimizer.step()
        if "cut" not in MODE and ("late" not in MODE or now >= LATE):
            self.change(2)
        strike("tail", now, rank)
        return loss.item()


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data = Pairs(120)
loader = DataLoader(data, 3, sampler=DistributedSampler(data, seed=5))
trainer = Trainer()
run = torchrelay.protect(model=model, optimizer=optimizer)
step = run.step(trainer.step)
for inputs, targets in run.batches(loader):
    loss = step(inputs, targets)
    note(rank, run.global_step, loss=loss, weight=trainer.weight())
    pace(run.global_step)
note_end(rank, model.module)
