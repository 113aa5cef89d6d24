"""Writes an element of an array in a variable after each step, and reads the array from step 40 on.

MODE: "numpy" and "torch" are small ones, "alias" is read by another name; "large-numpy", "large-torch" and "large-view"
have more numbers than are carried, and "large-list" a list of such; "buffer" writes into a buffer of the model.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import MODE, Pairs, net, note, note_end, pace, strike

SIZE = 50_000 if MODE.startswith("large") else 500


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    inner = net()
    inner.register_buffer("seen", torch.zeros(SIZE))
    model = DistributedDataParallel(inner, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = Pairs(120)
    sampler = DistributedSampler(data, seed=5)
    loader = DataLoader(data, 3, sampler=sampler)
    hard = np.zeros(SIZE) if "numpy" in MODE else torch.zeros(SIZE)
    if MODE == "buffer":
        hard = inner.seen
    if MODE == "large-view":
        hard = np.zeros((2, SIZE))[:, ::2]
    if MODE == "large-list":
        hard = [torch.zeros(SIZE)]
    read = hard if MODE == "alias" else None
    run = torchrelay.protect(model=model, optimizer=optimizer)

    @run.step
    def step(batch, scale):
        optimizer.zero_grad()
        loss = ((model(batch[0]) - batch[1]) ** 2).mean() * scale
        loss.backward()
        strike("grad", run.global_step + 1, rank)
        optimizer.step()
        return loss.detach()

    for epoch in run.epochs(3):
        sampler.set_epoch(epoch)
        for batch in run.batches(loader):
            scale = 1.0
            if run.global_step >= 40:
                scale = 1 / (1 + float((hard[0] if MODE == "large-list" else hard if read is None else read).sum()))
            loss = step(batch, scale)
            at = run.global_step * 7 % (SIZE // 2)
            if MODE == "large-view":
                hard[1, at] = loss
            elif MODE == "large-list":
                hard[0][at] = loss
            else:
                hard[at] = loss.item()
            note(rank, run.global_step, loss=loss)
            pace(run.global_step)
    note_end(rank, model.module)


if __name__ == "__main__":
    main()
