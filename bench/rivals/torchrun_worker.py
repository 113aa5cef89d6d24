"""Plain DDP under torchrun: without checkpoints, or with them, and then all ranks start again after a fault."""

from __future__ import annotations

import datetime
import os
import signal
import sys

import torch.distributed as dist
from checkpoints import Checkpoints
from task import Log, Task, read_order
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    order, rank = read_order(sys.argv[1]), int(os.environ["RANK"])
    leaving: list[int] = []
    if order.notice:
        signal.signal(signal.SIGUSR1, lambda number, _: leaving.append(number))
    task, checkpoints = Task(order), Checkpoints(order, rank)
    log = Log(order, rank)
    log.began()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=order.timeout_s))
    log.mark("connected")
    first = checkpoints.load(task) if order.every else 0
    log.mark("loaded")
    model = DistributedDataParallel(task.model)
    asked = False
    for step in range(first, order.steps):
        number = step * order.ranks + rank
        task.optimizer.zero_grad()
        task.loss(model, task.batch(number)).backward()  # type: ignore[no-untyped-call]
        task.optimizer.step()
        log.step(step + 1, number, order.ranks, task)
        checkpoints.after(step + 1, task)
        if leaving and not asked:
            checkpoints.ask()
            asked = True
        elif asked and not checkpoints.asked():
            os._exit(1)  # what was asked for lies on the disk: go, and let all start again
    checkpoints.wait()
    dist.destroy_process_group()
    if order.measure and rank == 0:
        checkpoints.measure(task)
    # Nothing is torn down: the reducer holds the group's last reference, and torch waits for Gloo's threads with the
    # interpreter's lock held, for which one of them may wait to let go of a work. It was seen.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
