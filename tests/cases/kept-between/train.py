"""Keeps a number between its steps, each MODE in another place; what it has come to matters from the 40th step on only.

It weighs this rank's own loss, so that replicas stay alike whatever it is: nobody else could find out that it is wrong.
"""

import contextvars
import enum
import os
import threading
import types
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import casework
import torchrelay
from casework import MODE, Pairs, net, note, note_end, pace, strike

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data = Pairs(120)
sampler = DistributedSampler(data, seed=5)
loader = DataLoader(data, 3, sampler=sampler)
run = torchrelay.protect(model=model, optimizer=optimizer)


@run.step
def step(batch, scale):
    optimizer.zero_grad()
    loss = ((model(batch[0]) - batch[1]) ** 2).mean()
    (loss * scale).backward()
    strike("grad", run.global_step + 1, rank)
    optimizer.step()
    return loss.detach()


def train(batch, seen):
    loss = step(batch, 1 / (1 + seen) if run.global_step >= 40 else 1.0)
    note(rank, run.global_step, loss=loss)
    pace(run.global_step)


# ---------------------------------------------------------------- in variables of the loop: values


class Phase(enum.Enum):
    WARMUP = 1
    MAIN = 2


class Progress(NamedTuple):
    seen: int = 0


@dataclass(frozen=True)
class Plan:
    seen: int = 0


def values():
    phase, progress, plan, flag, bad = Phase.WARMUP, Progress(), Plan(), False, 0

    def spoil():
        nonlocal bad
        bad += 1

    for epoch in run.epochs(3):
        sampler.set_epoch(epoch)
        for batch in run.batches(loader):
            seen = {"enum": phase.value, "flag": flag, "nonlocal": bad, "frozen": plan.seen}.get(MODE, progress.seen)
            train(batch, seen)
            if MODE == "enum":
                phase = Phase.MAIN if run.global_step > 9 else phase
            if MODE == "flag":
                flag = flag or run.global_step > 9
            if MODE == "namedtuple":
                progress = progress._replace(seen=progress.seen + 1)
            if MODE == "frozen":
                plan = replace(plan, seen=plan.seen + 1)
            if MODE == "nonlocal":
                spoil()


# ---------------------------------------------------------------- containers


def containers():
    sums, counts, recent, history = defaultdict(float), Counter(), deque([0] * 70, maxlen=100), []
    for epoch in run.epochs(3):
        sampler.set_epoch(epoch)
        for batch in run.batches(loader):
            train(batch, sums["seen"] + counts["seen"] + sum(recent) + len(history))
            if MODE == "defaultdict":
                sums["seen"] += 1
            if MODE == "counter":
                counts["seen"] += 1
            if MODE == "deque":
                recent.append(1)
            if MODE == "list":
                history += [0.5] * 10


# ---------------------------------------------------------------- outside of the loop


class Total:
    seen = 0

    @classmethod
    def add(cls):
        cls.seen += 1


class Meter:
    def add(self):
        global counted
        counted += 1


class Slots:
    __slots__ = ("seen",)

    def __init__(self):
        self.seen = 0


counted = 0
meter, slots = Meter(), Slots()
config = types.SimpleNamespace(seen=0)
context = contextvars.ContextVar("seen", default=0)
local = threading.local()
local.seen = 0
casework.seen = 0
os.environ["SEEN"] = "0"
KEEPERS = {"namespace": config, "thread": local, "module": casework, "slots": slots, "late": config}


def log():
    log.calls += 1


log.calls = 0


def remember(seen=[0]):  # noqa: B006 as scripts do
    seen[0] += 1
    return seen[0] - 1


def count():
    """Go on with what counts; returns what it was."""
    if MODE == "function":
        log()
        return log.calls - 1
    if MODE == "class":
        Total.add()
        return Total.seen - 1
    if MODE == "global":
        meter.add()
        return counted - 1
    if MODE == "default":
        return remember()
    if MODE == "contextvar":
        context.set(context.get() + 1)
        return context.get() - 1
    if MODE == "environ":
        os.environ["SEEN"] = str(int(os.environ["SEEN"]) + 1)
        return int(os.environ["SEEN"]) - 1
    keeper = KEEPERS[MODE]
    before = keeper.seen
    keeper.seen += MODE != "late" or run.global_step > 18
    return before


def outside():
    for epoch in run.epochs(3):
        sampler.set_epoch(epoch)
        for batch in run.batches(loader):
            train(batch, count())


KINDS = {
    "values": ("enum", "flag", "namedtuple", "frozen", "nonlocal"),
    "containers": ("defaultdict", "counter", "deque", "list"),
}
if MODE in KINDS["values"]:
    values()
elif MODE in KINDS["containers"]:
    containers()
else:
    outside()
note_end(rank, model.module)
run.atomic(dist.barrier)
