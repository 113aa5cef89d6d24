"""What it keeps outgrows what can be carried: at first a few entries, or plain ones, later too many, or others.

MODE: "counter", "dict" and "lazy" count keys that come up, 64 a step, from step 20 on; "fields" and "named" put an
object of the script's into a frozen dataclass and a named tuple in step 20; "rows" one with a lock into a dict.
"""

import dataclasses
import threading
from collections import Counter, defaultdict, namedtuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import MODE, Pairs, net, note, note_end, pace, strike


@dataclasses.dataclass(frozen=True)
class Fields:
    factor: float
    more: object = None


Named = namedtuple("Named", "factor more")


class Extra:
    def __init__(self, factor, held=None):
        self.factor, self.held = factor, held


class Weights:
    """A factor of the loss, from what was seen so far."""

    def __init__(self):
        made = {"counter": Counter, "dict": lambda: defaultdict(int), "lazy": lambda: None}
        self.seen = made.get(MODE, lambda: {"first": Extra(1.0)} if MODE == "rows" else None)()
        self.of = Fields(1.0) if MODE == "fields" else Named(1.0, None)

    def __call__(self, step):
        if MODE in ("fields", "named"):
            kind = Fields if MODE == "fields" else Named
            self.of = kind(1.0 + step / 100, Extra(1.0 + step / 50) if step >= 20 else None)
            return self.of.factor + (self.of.more.factor if self.of.more else 0.0)
        if MODE == "rows":
            self.seen[f"of {step}"] = Extra(step / 100, threading.Lock() if step >= 20 else None)
            return sum(one.factor for one in self.seen.values())
        if self.seen is None:
            self.seen = Counter()
        for key in range(64 if step >= 20 else 1):
            self.seen[f"{step} {key}"] += 1
        self.seen["all"] += 1
        return 1.0 + 0.01 * len(self.seen) + self.seen["all"]


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.0005)
data = Pairs(400)
sampler = DistributedSampler(data, seed=5)
loader = DataLoader(data, 4, sampler=sampler)
weights = Weights()
run = torchrelay.protect(model=model, optimizer=optimizer)


@run.step
def step(batch):
    optimizer.zero_grad()
    loss = weights(run.global_step) * ((model(batch[0]) - batch[1]) ** 2).mean()
    loss.backward()
    strike("grad", run.global_step + 1, rank)
    optimizer.step()
    return loss.detach()


for batch in run.batches(loader):
    loss = step(batch)
    note(rank, run.global_step, loss=loss)
    pace(run.global_step)
note_end(rank, model.module)
