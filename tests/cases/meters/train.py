"""Keeps a meter for each name, made when the name comes up, as many scripts do. MODE: where they are."""

from collections import defaultdict, deque

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import MODE, Pairs, net, note, note_end, pace, strike


class Meter:
    """A mean of all, and one of the last few."""

    def __init__(self, window=5):
        self.last, self.total, self.count = deque(maxlen=window), 0.0, 0
        self.name = f"of {window}"

    def update(self, value):
        self.last.append(value)
        self.total += value
        self.count += 1

    def told(self):
        return self.total / self.count + sum(self.last) / len(self.last) + self.last.maxlen


class Logger:
    """Meters by name; goes along with the batches."""

    def __init__(self):
        self.meters = defaultdict(Meter)

    def __getattr__(self, name):
        if name in self.meters:
            return self.meters[name]
        raise AttributeError(name)

    def along(self, batches):
        for batch in batches:
            yield batch
            self.meters["seen"].update(1.0)


class Handle:
    """What no other process can make."""

    def __init__(self):
        self.file, self.count = open("/dev/null"), 0  # noqa: SIM115


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data = Pairs(120)
sampler = DistributedSampler(data, seed=5)
loader = DataLoader(data, 3, sampler=sampler)
run = torchrelay.protect(model=model, optimizer=optimizer)
inside = {}


def count(kept, loss):
    if "loss" not in kept:
        kept["loss"] = Meter(3)
    kept["loss"].update(loss)
    return kept["loss"].told()


@run.step
def step(batch):
    optimizer.zero_grad()
    loss = ((model(batch[0]) - batch[1]) ** 2).mean()
    if MODE == "inside" and run.global_step > 5:
        loss = loss * (1 + 0.01 * count(inside, rank + float(len(inside))))
    loss.backward()
    strike("grad", run.global_step + 1, rank)
    optimizer.step()
    return loss.detach()


def told_of(loss, turn, logger, kept):
    """Of the meters of MODE."""
    if MODE in ("logger", "along"):
        logger.meters["loss"].update(loss)
        return logger.loss.told() + (logger.seen.told() if "seen" in logger.meters else 0)
    if MODE == "list":
        if turn % 4 == 0:
            kept.append(Meter(turn))
        for one in kept:
            one.update(loss)
        return sum(one.told() for one in kept)
    if MODE == "handle":
        kept.setdefault("loss", Handle()).count += 1
        return float(kept["loss"].count)
    return count(kept, loss) if MODE != "inside" else 0.0


def epoch_of():
    logger, kept = Logger(), [] if MODE == "list" else defaultdict(Meter) if MODE == "default" else {}
    several = [Meter(2), Meter(4)]
    batches = run.batches(loader)
    for batch in logger.along(batches) if MODE == "along" else batches:
        loss = step(batch)
        turn = run.global_step
        for one in several:
            one.update(loss.item())
        note(rank, turn, loss=loss, told=told_of(loss.item(), turn, logger, kept), last=several[-1].told())
        pace(turn)


for epoch in run.epochs(2):
    sampler.set_epoch(epoch)
    epoch_of()
note_end(rank, model.module)
run.atomic(dist.barrier)
