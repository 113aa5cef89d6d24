"""DDP in the in-process wrapper of NVRx: the function is called again on all ranks, and loads the last checkpoint.

There are more processes than ranks: the others are its reserve, and take the numbers of those that are lost. No
annotation of the function may be a text (as `from __future__ import annotations` makes them), nor `list[int]` or the
like: the wrapper looks for a parameter of its own type.
"""

import datetime
import os
import sys
from typing import Any

import torch.distributed as dist
from checkpoints import Checkpoints
from nvidia_resiliency_ext import inprocess  # type: ignore[import-not-found]
from task import Log, Order, Task, read_order
from torch.nn.parallel import DistributedDataParallel

MEET_S = 4.0  # below the soft timeout


class Process:
    """This process: what it had as a rank before, if it was one."""

    checkpoints: Checkpoints | None = None


def meet(store: Any, order: Order) -> None:
    """Connect all ranks of this try. Without the first line ranks may never meet again.

    A group gets its name, and its keys in the store, by a counter in the process. Only `destroy_process_group` sets it
    back, and not for a group that was never made: after a try to meet that failed, those who took part have counted it,
    and whoever comes from the reserve has not.
    """
    dist.distributed_c10d._world.group_count = 0
    patience = MEET_S if order.tuned else order.timeout_s
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=order.ranks, timeout=seconds(patience))
    dist.distributed_c10d._set_pg_timeout(seconds(order.timeout_s))  # to meet takes as long as the last one needs


def train(order: Order, task: Task, process: Process, call: inprocess.CallWrapper = None) -> None:
    """One try. The wrapper has set RANK; a process that has been a rank before has its data still, and its imports.

    The model is made anew, as in the examples of NVRx: a DDP that was interrupted in its backward pass lives on in the
    wrapper's exception, waits for gradients of the old model, and would reduce them in a group that is gone.
    """
    rank, port = int(os.environ["RANK"]), int(os.environ["TASK_PORT"]) + 1 + call.iteration
    log = Log(order, rank)
    if process.checkpoints is None:
        log.began()
    else:
        process.checkpoints.wait()  # nobody loads before rank 0 is here, and the file stays as it is from then on
        task.build()
    checkpoints = process.checkpoints = Checkpoints(order, rank)
    log.here()
    log.mark("called")
    # Nobody waits for the others here: the store's host would not hear that this try is over, and be ended as hung.
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, order.ranks, is_master=rank == 0, timeout=seconds(MEET_S), wait_for_workers=False
    )
    meet(store, order)
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
# timeout 60 and 90 s, last call 1 s, grace 5 s. With 5 and 8 s rank 0 was ended once while all were starting.
TUNED = {
    "monitor_thread_interval": 0.1, "monitor_process_interval": 0.1, "heartbeat_interval": 0.2, "heartbeat_timeout": 3,
    "progress_watchdog_interval": 0.2, "soft_timeout": 10, "hard_timeout": 15, "last_call_wait": 0.1,
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
        rank_assignment=inprocess.rank_assignment.Tree([everybody]),
        **times,
    )
    wrapper(train)(order, task, Process())
    os._exit(0)


if __name__ == "__main__":
    main()
