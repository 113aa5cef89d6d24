"""A loop of the script's own around the step, without a loader: windows of a text by chance, as nanoGPT takes them.

MODE    committed  `while run.global_step < n`
        metrics    the same, and the step returns a dict of metrics
        epochs     such a loop in each item of run.epochs(), and a section now and then
        break      `while True:` with a break
        counter    a counter of the script's own
"""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchrelay
from casework import MODE, net, note, note_end, pace, strike

STEPS = int(os.environ.get("STEPS", "60"))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    text = torch.randn(512, generator=torch.Generator().manual_seed(7))
    torch.manual_seed(1)
    model = DistributedDataParallel(net())
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    run = torchrelay.protect(model=model, optimizer=optimizer)

    @run.step
    def step(x, y):
        optimizer.zero_grad()
        loss = ((torch.nn.functional.dropout(model(x), 0.1) - y) ** 2).mean()
        loss.backward()
        strike("grad", run.global_step + 1, rank)
        mean = loss.detach() / world
        dist.all_reduce(mean)
        optimizer.step()
        return {"loss": mean, "classes": torch.zeros(100), "metrics": [0.5] * 10} if MODE == "metrics" else mean

    def average(value):
        value = value.clone()
        dist.all_reduce(value)
        return value

    def turn():
        at = torch.randint(len(text) - 9, (4,))
        found = step(torch.stack([text[i : i + 8] for i in at]), torch.stack([text[i + 8 : i + 9] for i in at]))
        loss = found["loss"] if MODE == "metrics" else found
        if run.global_step < 100 or run.global_step % 500 == 0:
            note(rank, run.global_step, loss=loss)
        pace(run.global_step)
        strike("after", run.global_step, rank)
        return loss

    go(run, rank, turn, average)
    note_end(rank, model.module)
    run.atomic(dist.barrier)
    dist.destroy_process_group()


def go(run, rank, turn, average):
    """The loop."""
    if MODE == "counter":
        count = 0
        while count < STEPS:
            turn()
            count += 1
    elif MODE == "break":
        while True:
            if run.global_step >= STEPS:
                break
            turn()
    elif MODE == "epochs":
        for epoch in run.epochs(3):
            while run.global_step < (epoch + 1) * STEPS // 3:
                if run.global_step % 7 == 0:
                    run.atomic(average, torch.ones(1))
                loss = turn()
            note(rank, run.global_step, epoch=epoch, average=run.atomic(average, loss))
    else:
        while run.global_step < STEPS:
            turn()


if __name__ == "__main__":
    main()
