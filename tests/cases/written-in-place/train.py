"""Writes an element of an array in a variable after each step, and reads the array from step 40 on.

MODE: "numpy" and "torch" are small ones, "alias" is read by another name; "large-numpy", "large-torch" and "large-view"
have more numbers than are carried, and "large-list" a list of such; "buffer" writes into a buffer of the model;
"held" keeps the state in lists and dicts, a sparse tensor and one of inference, which scripts do.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import MODE, Pairs, net, note, note_end, pace, strike

SIZE = 50_000 if MODE.startswith("large") else 500


def begin(inner):
    if MODE == "buffer":
        return inner.seen
    if MODE == "large-view":
        return np.zeros((2, SIZE))[:, ::2]
    if MODE == "large-list":
        return [torch.zeros(SIZE)]
    return np.zeros(SIZE) if "numpy" in MODE else torch.zeros(SIZE)


def write(hard, at, loss):
    if MODE == "large-view":
        hard[1, at] = loss
    elif MODE == "large-list":
        hard[0][at] = loss
    else:
        hard[at] = loss.item()


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
    hard = begin(inner)
    read = hard if MODE == "alias" else None
    parameters, named, moments = list(model.parameters()), dict(model.named_parameters()), optimizer.state
    weight, buffers = inner[0].weight, [inner.seen]
    sparse = torch.eye(3).to_sparse()
    with torch.inference_mode():
        frozen = torch.zeros(2)
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
            write(hard, run.global_step * 7 % (SIZE // 2), loss)
            note(rank, run.global_step, loss=loss)
            if MODE == "held":
                held = [*parameters, *named.values(), weight, *buffers, sparse.to_dense(), frozen]
                total = sum(each.detach().sum() for each in held)
                note(rank, run.global_step, total=total, moments=len(moments))
            pace(run.global_step)
    note_end(rank, model.module)


if __name__ == "__main__":
    main()
