"""What tests of groups let puppets do; the first argument is the puppet's `Actions`."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

from tests.scripts.groups_ranks import Actions, until
from torchrelay.worker.process_groups import abandon, groups, sockets


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def gate(_actions: Actions) -> float:
    """The gate of a step: one int32, straight on the group."""
    one = torch.ones(1, dtype=torch.int32)
    work = world().allreduce([one])
    work.wait()
    return one.item()


def large(_actions: Actions) -> None:
    dist.all_reduce(torch.zeros(4_000_000))


def broadcast(_actions: Actions) -> None:
    dist.broadcast(torch.zeros(1000), 0)


def gather_objects(actions: Actions) -> None:
    dist.all_gather_object([None] * actions.world_size, {"rank": actions.rank})


def barrier(_actions: Actions) -> None:
    dist.barrier()


def receive(_actions: Actions) -> None:
    dist.recv(torch.zeros(3), 0)


def send(_actions: Actions) -> None:
    dist.send(torch.zeros(8_000_000), 0)  # more than fits into the sockets' buffers


def send_much(_actions: Actions) -> None:
    """Sends 256 MB, each long under way, until it is killed."""
    much = torch.ones(64_000_000)
    while True:
        dist.send(much, 0)


def let_go_of_what_is_half_there(_actions: Actions) -> int:
    """Rank 0 gives up what rank 1 sends, in the middle of it. Returns how much of its end had not come by then.

    On a busy machine a whole message may come between two looks: then the next one is tried.
    """
    for _ in range(20):
        into = torch.zeros(64_000_000)
        work = dist.irecv(into, 1)
        assert work is not None
        until(lambda: into[0].item() == 1.0)  # noqa: B023
        if missing := int((into[-1000:] == 0).sum().item()):
            return missing
        work.wait()
    return 0


def send_while_silenced(_actions: Actions) -> None:
    """Of two ranks, rank 1: sends much, while what has ended is silenced again and again."""
    work = dist.isend(torch.ones(64_000_000), 0)
    assert work is not None
    waiting = threading.Thread(target=work.wait)
    waiting.start()
    while waiting.is_alive():
        groups.silence()


def receive_while_silenced(_actions: Actions) -> bool:
    """Of two ranks, rank 0: whether all has come although what has ended was silenced in the middle of it."""
    into = torch.zeros(64_000_000)
    work = dist.irecv(into, 1)
    assert work is not None
    until(lambda: into[0].item() == 1.0)
    groups.silence()
    work.wait()
    return bool((into == 1).all())


def restless_loops(_actions: Actions, looks: int = 20) -> int:
    """How many of Gloo's loops have something to do at every look, though nobody communicates: they spin."""
    busy = set(sockets.epolls())
    for _ in range(looks):
        busy = {epoll for epoll in busy if select.select([epoll], [], [], 0)[0]}
        time.sleep(0.005)
    return len(busy)


def key_of_the_store(_actions: Actions) -> None:
    distributed_c10d._get_default_store().get("never set")


def call_that_nobody_else_ends(_actions: Actions) -> None:
    abandon.await_unless_broken(threading.Event().wait, 60.0, "waiting for nothing")


def start_what_cannot_end(actions: Actions) -> None:
    """Of two ranks: each waits in its backend's thread for what the other sends, and its main thread goes on."""
    dist.broadcast(torch.zeros(1), 1 - actions.rank, async_op=True)


def make_and_destroy_a_group(actions: Actions) -> None:
    made = dist.new_group(list(range(actions.world_size)))
    dist.barrier()  # one that is ready and lets go of it breaks it for another that still connects
    dist.destroy_process_group(made)


def timeouts(_actions: Actions) -> float:
    """The timeout of the default group's backend, in seconds."""
    backend: Any = world()._get_backend(torch.device("cpu"))
    timeout: timedelta = backend.options._timeout
    return timeout.total_seconds()


def make_mesh(actions: Actions) -> None:
    actions.kept["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))


def sums_over_mesh(actions: Actions) -> list[float]:
    """The ranks' numbers, summed over each dimension: by the groups, and by the functional collectives' names."""
    mesh = actions.kept["mesh"]
    sums = []
    for dimension in ("rows", "columns"):
        mine = torch.tensor([float(actions.rank)])
        sums.append(functional.all_reduce(mine, "sum", mesh[dimension].get_group()).item())
        dist.all_reduce(mine, group=mesh.get_group(dimension))
        sums.append(mine.item())
    return sums


def monitored_barrier(_actions: Actions) -> None:
    dist.monitored_barrier(timeout=timedelta(seconds=20))


def pass_on(actions: Actions, times: int = 1) -> None:
    """Rank 0 sends to rank 1, and rank 1 to rank 2, as the stages of a pipeline do."""
    ways = [(dist.isend, 0, 1), (dist.irecv, 1, 0), (dist.isend, 1, 2), (dist.irecv, 2, 1)]
    for _ in range(times):
        mine = [dist.P2POp(how, torch.zeros(2), other) for how, one, other in ways if one == actions.rank]
        for work in dist.batch_isend_irecv(mine) if mine else ():
            work.wait()


def receive_from_anybody(actions: Actions) -> None:
    if actions.rank == 0:
        dist.send(torch.zeros(1), 1)
    elif actions.rank == 1:
        dist.recv(torch.zeros(1))


def name_servers(_actions: Actions | None = None) -> int:
    """How many name servers this thread would ask; its first lookup makes the list."""
    socket.getaddrinfo("localhost", 1)
    state = getattr(ctypes.CDLL(None), "__res_state")
    state.restype = ctypes.POINTER(abandon._Resolver)
    return int(state().contents.nscount)


def waits_for(_actions: Actions, what: str) -> bool:
    """Whether the main thread waits for a call that can be left behind, of this name."""
    return any(what in call.what for call in tuple(abandon._waiting))


def open_own_sockets(actions: Actions) -> None:
    """Connections as a script may have: to a server of its own in this process, and a pair."""
    listener = socket.create_server(("127.0.0.1", 0))
    here = socket.create_connection(listener.getsockname())
    there = listener.accept()[0]
    actions.kept["sockets"] = (listener, here, there, *socket.socketpair())


def own_sockets_work(actions: Actions) -> bool:
    listener, here, there, left, right = actions.kept["sockets"]
    for one, other in ((here, there), (left, right)):
        one.sendall(b"?")
        if other.recv(1) != b"?":
            return False
    socket.create_connection(listener.getsockname()).close()
    listener.accept()[0].close()
    return True


def fork_a_child(_actions: Actions) -> int:
    """A child as a DataLoader forks it, which outlives its rank."""
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    return child


def listening(_actions: Actions) -> list[tuple[str, int]]:
    return sorted(sockets.listening_addresses())
