"""Counts between its steps, each MODE in a place that is hard to see; it matters from the 21st step on only.

MODE with "-late": it begins after the tenth step. It weighs this rank's own loss, so that replicas stay alike.
"""

import array
import functools
import types
from collections import ChainMap, UserList

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchrelay
from casework import MODE, Pairs, net, note, note_end, pace, strike


def counter():
    kept = {"n": 0}

    def tick():
        kept["n"] += 1
        return kept["n"]

    return tick


class Holding:
    """A closure of the same function as another one."""

    def __init__(self):
        self.tick = counter()


class Outer:
    """With a class inside."""

    class Inner:
        n = 0

    def tick(self):
        self.Inner.n += 1
        return self.Inner.n


class Settings(dict):
    """Entries as attributes."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


def keyword(*, kept=[0]):  # noqa: B006 as scripts do
    kept[0] += 1
    return kept[0]


@functools.cache
def cached():
    return [0]


tick, holding, outer = counter(), Holding(), Outer()
users, chain, raw, numbers = UserList([0]), ChainMap({}, {"n": 0}), bytearray(4), array.array("i", [0])
made, settings = types.ModuleType("settings"), Settings(n=0)
made.n = 0
tensor, source = torch.zeros((), dtype=torch.long), np.random.default_rng(3)


def tensor_on():
    return int(tensor.add_(1))


def count():
    kind = MODE.removesuffix("-late")
    if kind in ("users", "raw", "numbers", "cached"):
        kept = cached() if kind == "cached" else {"users": users, "raw": raw, "numbers": numbers}[kind]
        kept[0] += 1
        return kept[0]
    if kind in ("made", "settings"):
        kept = made if kind == "made" else settings
        kept.n += 1
        return kept.n
    if kind == "chain":
        chain["n"] = chain["n"] + 1
        return chain["n"]
    if kind == "drawn":
        return source.integers(9)
    return {"closure": tick, "held": holding.tick, "nested": outer.tick, "keyword": keyword, "tensor": tensor_on}[
        kind
    ]()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    inner = net()
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    data = Pairs(200)
    run = torchrelay.protect(model=model, optimizer=optimizer)

    @run.step
    def step(at, weight):
        optimizer.zero_grad()
        loss = ((model(data.inputs[at : at + 3]) - data.targets[at : at + 3]) ** 2).mean() * weight
        loss.backward()
        strike("grad", run.global_step + 1, rank)
        optimizer.step()
        return loss.detach()

    inner.eval()  # what is asked of a module by this name reads no variable
    inner.train()
    for _ in run.steps(26):
        seen = 0 if MODE.endswith("-late") and run.global_step < 10 else count()
        weight = 1 + 0.01 * float(seen) if run.global_step > 20 else 1.0
        loss = step((run.global_step * 6 + rank * 3) % 190, weight)
        for parameter in inner.parameters():  # leaves a variable behind that nobody reads
            assert parameter.requires_grad
        note(rank, run.global_step, loss=loss)
        pace(run.global_step)
    note_end(rank, inner)
    run.atomic(dist.barrier)


main()
