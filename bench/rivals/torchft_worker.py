"""DDP under TorchFT: one replica group of one rank, as its documentation has it.

The loop goes by TorchFT's own count of steps, and draws the batch by it: a step that is refused is tried again with the
same batch, where the loader of its own example would go on to the next. What a missing replica would have seen is not
seen. After the last step it goes on until as many samples are done as the others have done by then.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from task import NOT_MINE, Log, Order, Task, read_order
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo  # type: ignore[import-not-found]


def begin_together(order: Order, rank: int) -> None:
    """Wait until all are there: the first would train alone. Only at the start; a replacement does not wait."""
    ready = Path(order.folder) / "ready"
    ready.mkdir(exist_ok=True)
    (ready / f"rank-{rank}").touch()
    until = time.monotonic() + 120
    while len(list(ready.iterdir())) < order.ranks and time.monotonic() < until:
        time.sleep(0.02)


def manager_of(order: Order, rank: int, task: Task) -> Any:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    limit, patience = datetime.timedelta(seconds=order.timeout_s), datetime.timedelta(seconds=60)
    return Manager(
        pg=ProcessGroupGloo(timeout=limit),
        timeout=limit,
        quorum_timeout=patience,
        connect_timeout=patience,
        min_replica_size=1,
        init_sync=False,
        load_state_dict=task.load,
        state_dict=task.state,
        replica_id=f"r{rank}",
        hostname="localhost",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
    )


def main() -> None:
    order, rank = read_order(sys.argv[1]), int(os.environ["REPLICA"])
    leaving: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: leaving.append(number))
    task, log = Task(order), Log(order, rank)
    log.began()
    manager = manager_of(order, rank, task)
    log.mark("connected")
    model, optimizer = DistributedDataParallel(manager, task.model), Optimizer(manager, task.optimizer)
    begin_together(order, rank)
    while manager.current_step() < order.steps or manager.batches_committed() < order.steps * order.ranks:
        if leaving:
            break
        before = manager.current_step()
        number = before * order.ranks + rank
        optimizer.zero_grad()
        task.loss(model, task.batch(number)).backward()  # type: ignore[no-untyped-call]
        mine = manager.is_participating()  # a replacement adds nothing in its first step
        optimizer.step()
        after = manager.current_step()
        log.step(
            after,
            number if mine and after == before + 1 else NOT_MINE,
            manager.num_participants(),
            task,
            committed=after > before,
        )
    manager.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
