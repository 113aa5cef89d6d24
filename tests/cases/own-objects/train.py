"""What objects of the script hold is used between a step and a section of the same turn, and at the head of a turn.

MODE: "meter" counts and averages losses, and lowers the learning rate before an evaluation; "decides" lets the count of
its own steps decide when there is one; "position" reads batches from a loader of its own; "late" binds a list of the
best anew, for the first time long after the first steps; "namespace" changes a setting of argparse; "threads" fills a
dict in a thread; "memory" learns from what it has seen, which only grows.
"""

import argparse
import collections
import queue
import random
import threading

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import MODE, Pairs, net, note, note_end, pace, strike


class Meter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value):
        self.sum += value
        self.count += 1

    @property
    def average(self):
        return self.sum / max(1, self.count)


class Batches:
    def __init__(self, data):
        self.data, self.position = data, rank * 4

    def next(self):
        at = self.position
        self.position = (at + 8) % 96
        return self.data.inputs[at : at + 4], self.data.targets[at : at + 4]


class Logger:
    def __init__(self):
        self.values, self.queue = {}, queue.Queue()
        threading.Thread(target=self.work, daemon=True).start()

    def work(self):
        at = 0
        while True:
            at += 1
            try:
                self.values["loss"] = self.queue.get(timeout=0.0005)
            except queue.Empty:
                self.values[f"beat {at % 30}"] = at
            if at % 30 == 0:
                self.values.clear()


class Memory:
    def __init__(self):
        self.seen = collections.deque(maxlen=500)

    def sample(self):
        some = random.sample(range(len(self.seen)), 3)
        return torch.stack([self.seen[at][0] for at in some]), torch.stack([self.seen[at][1] for at in some])


class Trainer:
    def __init__(self):
        self.steps, self.best, self.config = 0, [], argparse.Namespace(rate=0.02)
        self.meter, self.batches, self.logger, self.memory = Meter(), Batches(data), Logger(), Memory()

    def step(self, inputs, targets):
        for group in optimizer.param_groups:
            group["lr"] = self.config.rate
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        if MODE == "memory" and len(self.memory.seen) > 8:
            seen, wanted = self.memory.sample()
            loss = loss + (model(seen) - wanted).square().mean()
        loss.backward()
        strike("grad", run.global_step + 1, rank)
        optimizer.step()
        return loss.item()

    def evaluate(self):
        with torch.no_grad():
            found = model.module(data.inputs[rank::2]).mean()
        dist.all_reduce(found)
        return found.item()

    def train(self):
        step = run.step(self.step)
        found = 0.0
        for epoch in run.epochs(2):
            sampler.set_epoch(epoch)
            for inputs, targets in run.batches(loader):
                if MODE == "position":
                    inputs, targets = self.batches.next()
                if MODE == "memory":
                    self.memory.seen.extend(zip(inputs, targets, strict=True))
                loss = step(inputs, targets)
                self.steps += 1
                self.meter.update(loss)
                self.logger.queue.put(loss)
                due = self.steps % 7 == 0 if MODE == "decides" else run.global_step % 7 == 0
                if MODE == "late" and run.global_step % 10 == 0 and run.global_step >= 20:
                    self.best = sorted([*self.best, loss])[:3]
                if due:
                    if MODE in ("meter", "namespace"):
                        self.config.rate = 0.02 / (1 + 0.01 * self.meter.count)
                    found = run.atomic(self.evaluate)
                    strike("evaluated", run.global_step, rank)
                held = self.meter.average, self.config.rate, str(self.best), self.steps
                note(rank, run.global_step, loss=loss, held=str(held), found=found)
                pace(run.global_step)
                strike("after", run.global_step, rank)


dist.init_process_group("gloo")
rank = dist.get_rank()
random.seed(rank)
torch.manual_seed(1)
model = DistributedDataParallel(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
data = Pairs(160)
sampler = DistributedSampler(data, seed=5)
loader = DataLoader(data, 4, sampler=sampler)
run = torchrelay.protect(model=model, optimizer=optimizer)
Trainer().train()
run.atomic(dist.barrier)
note_end(rank, model.module)
