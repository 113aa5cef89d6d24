"""Trains for a few steps, and waits where a test wants to find it: halting.py --marks DIR [--astray STEP].

While a file hold-PLACE-STEP-rank-R is in DIR, rank R waits there, having made at-PLACE-STEP-rank-R.

DDP with dropout and BatchNorm, random numbers of all kinds between the calls, gradients that lie there at each entry,
and two sections after every third step. The places: entry (of a step, inside it), gate (before it), update (behind
it), between (after the step), section, end (of the script). With --astray all ranks catch an error of that step once,
and wait in "astray" before they make it again.
"""

import argparse
import random
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import torchrelay

STEPS = 9


class Places:
    """Where the test wants us to wait."""

    def __init__(self, marks, rank):
        self.marks, self.rank = Path(marks), rank

    def come_to(self, place, step):
        name = f"{place}-{step}-rank-{self.rank}"
        hold = self.marks / f"hold-{name}"
        if hold.exists():
            (self.marks / f"at-{name}").touch()
            while hold.exists():
                time.sleep(0.001)


def build(rank):
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 4)
    )
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    torch.manual_seed(100 + rank)
    random.seed(100 + rank)
    np.random.seed(100 + rank)
    return ddp, optimizer, schedule


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--marks", required=True)
    parser.add_argument("--astray", type=int, default=-1)
    return parser.parse_args()


def data_of_all():
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(96, 8, generator=generator), torch.randint(0, 4, (96,), generator=generator))


def main():
    options = arguments()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    places = Places(options.marks, rank)
    model, optimizer, schedule = build(rank)
    data = data_of_all()
    sampler = DistributedSampler(data, seed=3)
    run = torchrelay.protect(model=model, optimizer=optimizer, state={"schedule": schedule})
    optimizer.register_step_pre_hook(lambda *_: places.come_to("update", run.global_step + 1))

    astray = [options.astray]

    @run.step
    def train_step(x, y, noise):
        places.come_to("entry", run.global_step)
        if run.global_step in astray:
            astray.clear()
            raise ValueError("a bad batch")
        optimizer.zero_grad(set_to_none=run.global_step % 2 == 0)
        loss = torch.nn.functional.cross_entropy(model(x + noise), y)
        loss.backward()
        places.come_to("gate", run.global_step)
        optimizer.step()
        return loss.detach()

    def evaluate():
        places.come_to("section", run.global_step)
        total = torch.rand(1) + random.random()
        dist.all_reduce(total)
        return total.item()

    for epoch in run.epochs(100):
        sampler.set_epoch(epoch)
        for x, y in run.batches(DataLoader(data, batch_size=8, sampler=sampler)):
            noise = 0.1 * torch.randn(1) * random.random() * np.random.rand()
            try:
                loss = train_step(x, y, noise)
            except ValueError:
                places.come_to("astray", run.global_step)
                loss = train_step(x, y, noise)
            schedule.step()
            places.come_to("between", run.global_step)
            print(f"step {run.global_step} loss {loss.item():.6f} {torch.rand(1).item():.6f}", flush=True)
        values = [run.atomic(evaluate), run.atomic(evaluate)]
        print(f"values {values} {random.random()}", flush=True)
        if run.global_step >= STEPS:
            break
    places.come_to("end", run.global_step)


if __name__ == "__main__":
    main()
