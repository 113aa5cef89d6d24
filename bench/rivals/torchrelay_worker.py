"""Plain DDP with torchrelay."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from task import Log, Task, read_order
from torch.nn.parallel import DistributedDataParallel

import torchrelay


def main() -> None:
    order = read_order(sys.argv[1])
    task = Task(order)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(task.model)
    run = torchrelay.protect(model=model, optimizer=task.optimizer)
    log = Log(order, rank)

    @run.step
    def train_step(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        task.optimizer.zero_grad()
        task.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        task.optimizer.step()

    for step in run.steps(order.steps):
        number = step * order.ranks + rank
        train_step(task.batch(number))
        log.step(step + 1, number, order.ranks, task)
    run.atomic(dist.barrier)  # see the end of examples/train_gpt.py
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
