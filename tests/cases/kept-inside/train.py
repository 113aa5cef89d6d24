"""Goes on with something inside its step, before the update, each MODE in another place.

The rank that lives makes the step again when the other one dies in it, and must not count twice; and what replaces the
other one must not begin anew.
"""

import contextvars
import functools
import itertools
import os
import queue
import threading
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import casework
import torchrelay
from casework import MODE, Pairs, net, note, note_end, pace, strike

dist.init_process_group("gloo")
rank = dist.get_rank()
sums, counts = defaultdict(float), Counter()
numbers = iter(range(1000))
ring = itertools.cycle([1, 2, 3, 5, 7])
waiting = queue.Queue()
for at in range(500):
    waiting.put(at % 17)
context = contextvars.ContextVar("n", default=0)
local = threading.local()
local.n = 0
casework.n = 0
os.environ["N"] = "0"
file = Path(os.environ["OUT"]) / f"n-{rank}"


def calls():
    calls.n = getattr(calls, "n", 0) + 1 + rank
    return calls.n


def growing():
    x = 1.0
    while True:
        x = x * 1.37 % 5
        yield x


grown = growing()


@functools.lru_cache
def source():
    return np.random.default_rng(rank)


class Fib(list):
    """A list with a way to go on."""

    def tick(self):
        self.append((self[-1] + self[-2]) % 17 if len(self) > 1 else 1 + rank)
        return self[-1]


class Settings(dict):
    """Entries as attributes, as in many a configuration."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__

    def clear(self):
        raise RuntimeError("not that way")


class Described:
    """With a descriptor that knows of objects only."""

    class Number:
        def __get__(self, thing, kind=None):
            return thing.n

    number = Number()

    def __init__(self):
        self.n = 0

    def count(self):
        self.n += 1 + rank
        return self.number


fib, settings, described = Fib(), Settings(n=0), Described()


class Center:
    """As DINO has one: 20 kB, changed where it lies."""

    def __init__(self):
        self.value = torch.zeros(5000)

    def update(self):
        self.value.mul_(0.9).add_(0.1)
        return self.value[0].item()


center = Center()


def number(step):
    if MODE in ("defaultdict", "counter"):
        kept = sums if MODE == "defaultdict" else counts
        kept["n"] += 1
        return kept["n"]
    if MODE in ("module", "thread"):
        kept = casework if MODE == "module" else local
        kept.n += 1
        return kept.n
    if MODE == "own-dict":
        settings.n += 1 + rank
        return settings.n
    if MODE == "environ":
        os.environ["N"] = str(int(os.environ["N"]) + 1)
        return int(os.environ["N"])
    if MODE == "contextvar":
        context.set(context.get() + 1)
        return context.get()
    if MODE == "file":
        file.write_text(str(int(file.read_text()) + 1 if file.exists() else 1))
        return int(file.read_text())
    if MODE.startswith("lazy") or MODE in ("begins", "grows", "fills"):
        return first(step) if step > 4 else 0  # nothing of it moves before the sixth step
    others = {
        "function": calls, "iterator": lambda: next(numbers), "cycle": lambda: next(ring), "queue": waiting.get,
        "generator": lambda: next(grown), "cached": lambda: source().random(), "large": center.update,
        "own-list": fib.tick, "descriptor": described.count,
    }  # fmt: skip
    return others[MODE]()


class Kept:
    """For what begins to move late."""

    number, history, cache = 0, [7] * 100, {at: at for at in range(-100, 0)}


kept = Kept()
kept.history, kept.cache = list(Kept.history), dict(Kept.cache)


def first(step):
    if MODE == "lazy":  # there is no such attribute before
        return calls()
    if MODE == "lazy-class":
        Kept.late = getattr(Kept, "late", 0) + 1
        return Kept.late
    if MODE == "lazy-global":
        global late
        late = globals().get("late", 0) + 1
        return late
    if MODE == "lazy-environ":
        os.environ["LATE"] = str(int(os.environ.get("LATE", 0)) + 1)
        return int(os.environ["LATE"])
    if MODE == "begins":
        kept.number = kept.number + 1 if kept.number else step + rank
        return kept.number
    if MODE == "grows":
        kept.history.append(step)
        return len(kept.history) % 13
    kept.cache[len(kept.cache)] = step
    return len(kept.cache) % 13


def main():
    torch.manual_seed(1)
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    data = Pairs(200)
    run = torchrelay.protect(model=model, optimizer=optimizer)

    @run.step
    def step(at):
        optimizer.zero_grad()
        loss = ((model(data.inputs[at : at + 3]) - data.targets[at : at + 3]) ** 2).mean()
        (loss * (1 + 0.01 * number(run.global_step))).backward()
        strike("grad", run.global_step + 1, rank)
        optimizer.step()
        strike("update", run.global_step + 1, rank)
        return loss.detach()

    for _ in run.steps(12):
        loss = step((run.global_step * 6 + rank * 3) % 190)
        strike("after", run.global_step, rank)
        note(rank, run.global_step, loss=loss)
        pace(run.global_step)
    note_end(rank, model.module)
    run.atomic(dist.barrier)


main()
