"""DDP in the in-process wrapper of NVRx: the function is called again on all ranks, and loads the last checkpoint.

There are more processes than ranks: the others are its reserve, and take the numbers of those that are lost. No
annotation of the function may be a text (as `from __future__ import annotations` makes them), nor `list[int]` or the
like: the wrapper looks for a parameter of its own type.
"""

import datetime
import os
import sys

import torch.distributed as dist
from checkpoints import Checkpoints
from nvidia_resiliency_ext import inprocess  # type: ignore[import-not-found]
from task import Log, Order, Task, read_order
from torch.nn.parallel import DistributedDataParallel


class Process:
    """This process: whether it has been a rank before."""

    fresh = True


def train(order: Order, task: Task, process: Process, call: inprocess.CallWrapper = None) -> None:
    """One try. The wrapper has set RANK; a process that has been a rank before has its model still."""
    rank, port = int(os.environ["RANK"]), int(os.environ["TASK_PORT"]) + 1 + call.iteration
    log, checkpoints = Log(order, rank), Checkpoints(order, rank)
    if process.fresh:
        log.began()
        process.fresh = False
    log.here()
    checkpoints.first(task)
    log.mark("called")
    store = dist.TCPStore("127.0.0.1", port, order.ranks, is_master=rank == 0)  # type: ignore[attr-defined]
    timeout = datetime.timedelta(seconds=order.timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=order.ranks, timeout=timeout)
    log.mark("connected")
    first = checkpoints.load(task)
    log.mark("loaded")
    model = DistributedDataParallel(task.model)
    for step in range(first, order.steps):
        number = step * order.ranks + rank
        task.optimizer.zero_grad()
        task.loss(model, task.batch(number)).backward()  # type: ignore[no-untyped-call]
        task.optimizer.step()
        log.step(step + 1, number, order.ranks, task)
        checkpoints.after(step + 1, task)
        call.ping()
    checkpoints.wait()
    dist.destroy_process_group()


def seconds(value: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=value)


# Of a careful user on one machine; what is not named keeps its default: monitor 1 s, heartbeat 30 s, soft and hard
# timeout 60 and 90 s, last call 1 s, grace 5 s.
TUNED = {
    "monitor_thread_interval": 0.1, "monitor_process_interval": 0.1, "heartbeat_interval": 0.2, "heartbeat_timeout": 3,
    "progress_watchdog_interval": 0.2, "soft_timeout": 5, "hard_timeout": 8, "last_call_wait": 0.1,
    "termination_grace_time": 1,
}  # fmt: skip


def main() -> None:
    order = read_order(sys.argv[1])
    task = Task(order)
    everybody = inprocess.rank_assignment.Layer(
        min_ranks=order.ranks, max_ranks=order.ranks, flag=inprocess.rank_assignment.LayerFlag.RESERVE
    )
    times = {name: seconds(value) for name, value in TUNED.items()} if order.tuned else {}
    wrapper = inprocess.Wrapper(
        store_kwargs={"port": int(os.environ["TASK_PORT"]), "timeout": seconds(120)},
        rank_assignment=inprocess.rank_assignment.Tree([everybody]), **times,
    )  # fmt: skip
    wrapper(train)(order, task, Process())
    os._exit(0)


if __name__ == "__main__":
    main()
