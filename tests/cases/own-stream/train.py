"""Data from a generator of the script's own, beside a tracked loop, fetched into a variable that the step reads.

MODE: what an item is: tensor, tuple, list, dict; "argument": a tuple that the step is called with; "buffer": it is
copied into a tensor; "object": it is an attribute of an object.
"""

from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchrelay
from casework import MODE, net, note, note_end, strike


def stream(rank):
    generator = torch.Generator().manual_seed(5 + rank)
    while True:
        both = torch.randn(4, 8, generator=generator), torch.randn(4, 1, generator=generator)
        yield {"tensor": torch.cat(both, 1), "list": list(both), "dict": {"x": both[0], "y": both[1]}}.get(
            "tensor" if MODE == "buffer" else MODE, both
        )


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run = torchrelay.protect(model=model, optimizer=optimizer)
    items = [stream(rank)]  # where nobody looks for one
    batch = next(items[0])
    held = SimpleNamespace(batch=batch)

    def update(item):
        if MODE in ("tensor", "buffer"):
            x, y = item[:, :8], item[:, 8:]
        else:
            x, y = (item["x"], item["y"]) if MODE == "dict" else item
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        strike("grad", run.global_step + 1, dist.get_rank())
        optimizer.step()
        return loss.detach()

    @run.step
    def step():
        return update(batch)

    @run.step
    def of_object():
        return update(held.batch)

    @run.step
    def called(item):
        return update(item)

    for _ in run.steps(60):
        make = {"argument": partial(called, batch), "object": of_object}.get(MODE, step)
        note(rank, run.global_step, loss=make())
        if MODE == "buffer":
            batch.copy_(next(items[0]))
        else:
            batch = held.batch = next(items[0])
    note_end(rank, model.module)


if __name__ == "__main__":
    main()
