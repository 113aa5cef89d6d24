"""A script that goes on from its newest checkpoint, which it writes in a section after each epoch.

MODE    shrink     run.epochs(n - start)
        skip       `if epoch < start: continue`
        offset     start counts for the numbers of steps that are logged, and for nothing else
        plain      the checkpoint holds the model's parameters and no optimizer
        NAME-once  the same with torchrelay.once()
"""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import MODE, OUT, Pairs, net, note, note_end, pace, strike

EPOCHS = 4
WAY, _, ONCE = MODE.partition("-")
CHECKPOINT = OUT / "checkpoint.pt"


def load_into(model, optimizer):
    """The number of epochs behind the checkpoint; 0 without one."""
    if not CHECKPOINT.exists():
        return 0
    saved = torch.load(CHECKPOINT)
    model.load_state_dict(saved["model"])
    if WAY != "plain":
        optimizer.load_state_dict(saved["optimizer"])
    return saved["epoch"]


def write(model, optimizer, done):
    saved = {"model": model.state_dict(), "epoch": done}
    if WAY != "plain":
        saved["optimizer"] = optimizer.state_dict()
    torch.save(saved, f"{CHECKPOINT}.tmp")
    os.replace(f"{CHECKPOINT}.tmp", CHECKPOINT)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = Pairs(40)
    sampler = DistributedSampler(data, seed=5)
    loader = DataLoader(data, 4, sampler=sampler)

    def load():
        return load_into(model.module, optimizer)

    start = torchrelay.once("start", load) if ONCE else load()
    run = torchrelay.protect(model=model, optimizer=optimizer)

    @run.step
    def step(batch):
        optimizer.zero_grad()
        loss = ((model(batch[0]) - batch[1]) ** 2).mean()
        loss.backward()
        strike("grad", run.global_step + 1, rank)
        mean = loss.detach() / world
        dist.all_reduce(mean)
        optimizer.step()
        return mean

    def save(done):
        if rank == 0:
            write(model.module, optimizer, done)
        dist.barrier()

    for count in run.epochs(EPOCHS - start if WAY == "shrink" else EPOCHS):
        epoch = count + start if WAY == "shrink" else count
        if WAY == "skip" and epoch < start:
            continue
        sampler.set_epoch(epoch)
        for batch in run.batches(loader):
            loss = step(batch)
            shown = start * len(loader) + run.global_step
            note(rank, run.global_step, loss=loss, epoch=epoch, shown=shown)
            pace(run.global_step)
            strike("after", run.global_step, rank)
        run.atomic(save, epoch + 1)
    note_end(rank, model.module)
    run.atomic(dist.barrier)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
