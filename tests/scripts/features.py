"""Training scripts with one feature each that makes a rank hard to replace; --die kills ranks, once at each place.

features.py FEATURE --steps 9 --die 1:4:gate,0:5:between --marks DIR
"""

import argparse
import os
import random
import signal
import time
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import torchrelay


class Noisy(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((8,), index / 40) + 0.1 * torch.randn(8) + 0.1 * random.random()


class Stream(IterableDataset):
    def __init__(self, rank):
        self.rank, self.at = rank, 0

    def __iter__(self):
        while True:
            self.at += 1
            yield torch.full((8,), self.at / 100 + self.rank) + 0.1 * torch.randn(8)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Death:
    """Kills this rank at some places, once at each."""

    def __init__(self, options):
        self.marks = Path(options.marks)
        self.places = [
            place.split(":", 1)[1] for place in options.die.split(",") if place.startswith(f"{dist.get_rank()}:")
        ]

    @staticmethod
    def place(run, phase):
        return f"{run.global_step + (phase == 'update')}:{phase}"  # in an update the step that it is of counts

    def due(self, run, phase):
        if not any(place.endswith(f":{phase}") for place in self.places):
            return False  # a step that asks for run.global_step is not rehearsed further
        place = self.place(run, phase)
        return place in self.places and not (self.marks / f"died {place}").exists()

    def at(self, run, phase):
        if self.due(run, phase):
            (self.marks / f"died {self.place(run, phase)}").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)


def small(seed=0):
    torch.manual_seed(seed)
    layers = torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 4)
    return torch.nn.Sequential(*layers)


def own_numbers(rank):
    torch.manual_seed(100 + rank)
    random.seed(100 + rank)
    numpy.random.seed(100 + rank)  # never drawn from, but a part of the state: two runs must begin alike


def make_step(run, model, optimizer, death, *, before=lambda loss: loss):
    @run.step
    def train_step(x):
        optimizer.zero_grad()
        death.at(run, "forward")
        loss = model(x).square().mean()
        before(loss).backward()
        if death.due(run, "gate"):
            time.sleep(0.3)  # all gradients are reduced: the others go into the gate meanwhile
            death.at(run, "gate")
        optimizer.step()
        death.at(run, "update")
        return loss.detach()

    return train_step


def epochs(run, options, loader, train_step, death, each=lambda: None):
    """The usual loop."""
    for epoch in run.epochs(100):
        if isinstance(getattr(loader, "sampler", None), DistributedSampler):
            loader.sampler.set_epoch(epoch)
        for batch in run.batches(loader):
            if run.global_step >= options.steps:
                return
            loss = train_step(batch)
            each()
            death.at(run, "between")
        print(f"epoch {epoch} ended with {loss:.6f}")


def plain(options, death, rank):
    """DDP, AdamW, a schedule; shuffled by the global generator."""
    model = DistributedDataParallel(small())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    own_numbers(rank)
    run = torchrelay.protect(model=model, optimizer=optimizer, state={"schedule": schedule})
    loader = DataLoader(Noisy(), batch_size=8, shuffle=True)
    epochs(run, options, loader, make_step(run, model, optimizer, death), death, schedule.step)


def scaler(options, death, rank):
    """GradScaler; every fourth step has no finite gradient, and skips its update."""
    model = DistributedDataParallel(small())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    own_numbers(rank)
    run = torchrelay.protect(model=model, optimizer=optimizer, state={"scaler": scaler})

    @run.step
    def train_step(x):
        optimizer.zero_grad()
        death.at(run, "forward")
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        if run.global_step % 4 == 3:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        death.at(run, "update")
        scaler.update()
        return loss.detach()

    loader = DataLoader(Noisy(), batch_size=8, sampler=DistributedSampler(Noisy()))
    epochs(run, options, loader, train_step, death)


def two_optimizers(options, death, rank):
    """Two models that are trained in turns, two calls in an item, and one step with two updates."""
    first, second = DistributedDataParallel(small(1)), DistributedDataParallel(small(2))
    optimizers = [torch.optim.SGD(first.parameters(), lr=1e-2), torch.optim.Adam(second.parameters(), lr=1e-2)]
    own_numbers(rank)
    run = torchrelay.protect(model={"first": first, "second": second}, optimizer=optimizers)
    one = make_step(run, first, optimizers[0], death)

    @run.step
    def both(x, weight):
        for optimizer in optimizers:
            optimizer.zero_grad()
        death.at(run, "forward")
        loss = (first(x) - second(x)).square().mean() * weight
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            death.at(run, "update")
        return {"loss": loss.item(), "pair": (1, [None])}

    for batch in run.batches(DataLoader(Noisy(), batch_size=2, shuffle=True)):
        weight = 1 / (1 + one(batch))
        if run.global_step >= options.steps:
            return
        told = both(batch, weight)
        assert told["pair"] == (1, [None])
        death.at(run, "between")


def accumulate(options, death, rank):
    """Gradient accumulation: all micro-batches of an update in one call."""
    model = DistributedDataParallel(small(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    own_numbers(rank)
    run = torchrelay.protect(model=model, optimizer=optimizer)

    @run.step
    def train_step(batches):
        for number, x in enumerate(batches):
            death.at(run, "forward") if number else None
            if number < len(batches) - 1:
                with model.no_sync():
                    (model(x).square().mean() / len(batches)).backward()
            else:
                (model(x).square().mean() / len(batches)).backward()
        optimizer.step()
        death.at(run, "update")
        optimizer.zero_grad()

    for _ in run.epochs(100):
        for batches in run.batches(DataLoader(Noisy(), batch_size=3, shuffle=True), micro_batches=4):
            if run.global_step >= options.steps:
                return
            train_step(batches)
            death.at(run, "between")


def loader_workers(options, death, rank):
    """Two loader workers with random augmentation."""
    model = DistributedDataParallel(small())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    own_numbers(rank)
    run = torchrelay.protect(model=model, optimizer=optimizer)
    data = Noisy()
    loader = DataLoader(data, 4, sampler=DistributedSampler(data), num_workers=2, persistent_workers=True)
    epochs(run, options, loader, make_step(run, model, optimizer, death), death)


def stream(options, death, rank):
    """An iterable dataset with a state, and a generator of the script's own."""
    model = DistributedDataParallel(small())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    noise = torch.Generator().manual_seed(rank)
    own_numbers(rank)
    run = torchrelay.protect(model=model, optimizer=optimizer, state={"noise": noise})
    step = make_step(run, model, optimizer, death, before=lambda loss: loss * (1 + torch.rand((), generator=noise)))
    for batch in run.batches(DataLoader(Stream(rank), batch_size=3)):
        if run.global_step >= options.steps:
            return
        step(batch)
        death.at(run, "between")


def saved(options, death, rank, by_path=False):
    """The functions for checkpoints that the script has already; gradients reduced by hand, no DDP."""
    model = small()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    own_numbers(rank)

    def save(path=None):
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if path is None:
            return state
        torch.save(state, path)

    def save_file(path):
        torch.save(save(), path)

    def load(state):
        state = torch.load(state, weights_only=True) if by_path else state
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    run = torchrelay.protect(save=save_file if by_path else (lambda: save()), load=load)

    @run.step
    def train_step(x):
        optimizer.zero_grad()
        death.at(run, "forward")
        loss = model(x).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        death.at(run, "update")
        return loss.detach()

    epochs(run, options, DataLoader(Noisy(), batch_size=8, shuffle=True), train_step, death)


def saved_by_path(options, death, rank):
    """The same with files."""
    saved(options, death, rank, by_path=True)


def sections(options, death, rank):
    """Sections of all kinds between the steps, loops inside them, and results that steer the script."""
    model = DistributedDataParallel(small())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    own_numbers(rank)
    settings = torchrelay.once("settings", agree_on_settings, options)
    run = torchrelay.protect(model=model, optimizer=optimizer)
    step = make_step(run, model, optimizer, death)
    data = Noisy()

    def evaluate(scale):
        death.at(run, "section")
        model.eval()
        total = sum(model.module(x).square().sum() for x in run.batches(DataLoader(data, batch_size=16)))
        dist.all_reduce(total)
        model.train()
        return total.item() * scale + torch.rand(()).item()

    for _ in run.epochs(100):
        best = run.atomic(evaluate, settings["scale"])
        for batch in run.batches(DataLoader(data, batch_size=10, shuffle=True)):
            step(batch)
            if run.global_step % 3 == 0:
                now = run.atomic(evaluate, scale=0.5)
                again = run.atomic(lambda value: value + 1, now)
                best = min(best, now, again)
            death.at(run, "between")
            if run.global_step >= options.steps:
                print(f"best {best:.6f}")
                return
        print(f"best {best:.6f}")


def agree_on_settings(options):
    """Rank 0's settings for everybody: only possible while everybody is there."""
    with (Path(options.marks) / f"agreed-{dist.get_rank()}").open("a") as file:
        file.write("once\n")
    scale = torch.tensor(2.0 if dist.get_rank() == 0 else 0.0)
    dist.broadcast(scale, src=0)
    return {"scale": scale.item()}


class CpuTracker:
    """As DTensor's tracker of random numbers does on CUDA: made by all together, it takes rank 0's random state."""

    def __init__(self, _, run_state_sync=True):
        if run_state_sync:
            state = torch.get_rng_state()
            dist.broadcast(state, 0)
            torch.set_rng_state(state)


def tracker(options, death, rank, first=3):
    """A step that makes DTensor's tracker, if it is not there, when `first` steps are committed."""
    import torch.distributed.tensor._random as tensors

    tensors.OffsetBasedRNGTracker = CpuTracker
    model = DistributedDataParallel(small())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    own_numbers(rank)
    run = torchrelay.protect(model=model, optimizer=optimizer)

    def draw_alike(loss):
        if run.global_step >= first and tensors._rng_tracker is None:
            tensors._rng_tracker = tensors.OffsetBasedRNGTracker(None)
            death.at(run, "tracker")
        return loss * (1 + torch.rand(()))

    step = make_step(run, model, optimizer, death, before=draw_alike)
    epochs(run, options, DataLoader(Noisy(), batch_size=8, shuffle=True), step, death)


def tracker_cut(options, death, rank):
    """The same, later: the fault comes just after all have made it, and the step is redone."""
    tracker(options, death, rank, first=4)


CARRIED = (plain, scaler, two_optimizers, accumulate, loader_workers, stream, saved, saved_by_path, sections)
FEATURES = {f.__name__: f for f in (*CARRIED, tracker, tracker_cut)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("feature", choices=FEATURES)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--die", default="")
    parser.add_argument("--marks", default=".")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    FEATURES[options.feature](options, Death(options), dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
