"""Tensors that a step keeps from step to step, in places that other tensors take.

MODE: "window" is a deque of the last losses, and "long" one of 100; "begin" goes back to the same zeros now and then;
"rows" takes a row from a table, and a tensor from a list; "twice" keeps one tensor in two places; "hidden" is the
hidden state of a recurrent network: None at first, then a tuple; "variable" hands one from step to step.
"""

from collections import deque

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import MODE, Pairs, note, note_end, pace, strike


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.last = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 1)
        self.hidden = None

    def forward(self, inputs, hidden=None):
        out, found = self.inner(inputs.unsqueeze(1), self.hidden if MODE == "hidden" else hidden)
        found = tuple(each.detach() for each in found)
        if MODE == "hidden":
            self.hidden = found
        return self.last(out[:, 0]), found


class Trainer:
    def __init__(self):
        self.window = deque(maxlen=100 if MODE == "long" else 10)
        self.start = torch.zeros(1)
        self.average = self.start
        self.table, self.rows = torch.arange(40.0).view(20, 2), [torch.ones(1) * at for at in range(20)]
        self.row, self.one = self.table[0], self.rows[0]
        self.newest, self.history = None, []

    def weight(self):
        found = torch.ones(1)
        if self.window:
            found = found + 0.1 * torch.stack(list(self.window)).mean()
        if MODE == "rows":
            at = run.global_step % 20
            self.row, self.one = self.table[at], self.rows[at]
            found = found + 0.01 * self.row.sum() + 0.001 * (self.table.sum() + sum(self.rows))
        if self.newest is not None:
            found = found + 0.1 * self.newest * self.history[-1]
        return found + 0.01 * self.average

    def keep(self, loss):
        if MODE in ("window", "long"):
            self.window.append(loss)
        elif MODE == "begin":
            self.average = self.start + 1 if run.global_step % 10 == 0 else self.average * 1.1 + loss
        elif MODE == "twice":
            self.newest = loss
            self.history = [*self.history[-3:], loss]

    def step(self, batch, hidden=None):
        optimizer.zero_grad()
        out, hidden = model(batch[0], hidden)
        loss = (out - batch[1]).square().mean() * self.weight().item()
        loss.backward()
        strike("grad", run.global_step + 1, rank)
        optimizer.step()
        self.keep(loss.detach())
        return loss.detach(), hidden


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1 + rank)
model = DistributedDataParallel(Recurrent())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data = Pairs(480)
sampler = DistributedSampler(data, seed=5)
loader = DataLoader(data, 4, sampler=sampler)
run = torchrelay.protect(model=model, optimizer=optimizer)
trainer = Trainer()
step = run.step(trainer.step)
hidden = None
for epoch in run.epochs(2):
    sampler.set_epoch(epoch)
    for batch in run.batches(loader):
        loss, found = step(batch, hidden)
        if MODE == "variable":
            hidden = found
        note(rank, run.global_step, loss=loss, held=len(trainer.window))
        pace(run.global_step)
        strike("after", run.global_step, rank)
run.atomic(dist.barrier)
note_end(rank, model.module)
