"""Process groups that can be torn down and wired anew underneath whoever holds them.

A `ProcessGroup` is a handle: DDP's reducer, DeviceMesh and the script keep it. What communicates is the backend below
it. `reconfigure` replaces the backends of all groups and leaves the handles. `break_connections`, from another thread,
makes calls that are blocked in a backend fail at once.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, HashStore, PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from torchrelay.errors import RefusedError
from torchrelay.worker.hardware import device
from torchrelay.worker.process_groups import abandon, foreign, swap
from torchrelay.worker.process_groups.abandon import Abandoned, await_unless_broken
from torchrelay.worker.process_groups.aborts import Aborts
from torchrelay.worker.process_groups.backends import Backends, Wiring
from torchrelay.worker.process_groups.roll_call import call_roll
from torchrelay.worker.process_groups.sockets import Address, Ours, plain_address
from torchrelay.worker.process_groups.swap import Swap, build_extension

__all__ = [
    "ReconfigureError",
    "begun_elsewhere",
    "break_connections",
    "build_extension",
    "collectives",
    "connect_store",
    "count_aside",
    "host_store",
    "init_as_torch",
    "init_replacement",
    "is_collective_error",
    "method",
    "protect",
    "reconfigure",
    "silence",
    "timeout_s",
]

log = logging.getLogger(__name__)

RELEASE_S = 0.05  # how long connecting waits for the old backends to end; it takes milliseconds, or very long

# torch's own, from before anybody puts something in its place: we are what is put there.
_init_process_group = dist.init_process_group


class ReconfigureError(Exception):
    """The groups could not be connected in this generation. A later generation may be tried."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _Process:
    """What this process knows of its groups. There is one, as there is one torch.distributed."""

    def __init__(self) -> None:
        self.ours = Ours()
        self.aborts = Aborts()
        self.backends = Backends(self.ours, self.swap, self.aborts)
        self.covers_forks = False
        self._swap: Swap | None = None
        self._lock = threading.Lock()

    def swap(self) -> Swap:
        """How backends are replaced here; chosen once."""
        with self._lock:
            if self._swap is None:
                self._swap, reason = swap.load()
                log.info("groups are reconfigured by %s: %s", self._swap.name, reason)
            return self._swap

    def cover_forks(self) -> None:
        """Children (of a DataLoader) must not hold our connections open when this rank dies."""
        if not self.covers_forks:
            self.covers_forks = True
            os.register_at_fork(after_in_child=self.ours.cover)


_process = _Process()


def method() -> str:
    """How groups are reconfigured in this process: 'extension', or 'fresh backend type' if it is not compiled."""
    return _process.swap().name


# ---------------------------------------------------------------- stores

# Workers find each other at a store: one hosts it, all connect.

START_S = 60.0
BACKLOG = 1024  # connections that wait for the store's thread: as many as there are ranks may come at once


def host_store(host: str) -> tuple[TCPStore, str]:
    """Serve a store on this host name or address, and on no other interface; returns it and its 'host:port'."""
    _process.cover_forks()
    return _serve_store(_process.ours, host)


def connect_store(address: str, timeout_s: float) -> TCPStore:
    """A client of the store at 'host:port'. Raises `ReconfigureError`; `break_connections` ends the waiting."""
    try:
        return _reach_store(_process.ours, address, timeout_s)
    except (Abandoned, OSError, ValueError, dist.DistError) as error:
        raise ReconfigureError(f"no store at {address}: {error}") from error


def _serve_store(ours: Ours, host_name: str) -> tuple[TCPStore, str]:
    """Serve a store on `host_name` alone; returns it and its address, host:port.

    torch would bind its server to every interface; it is handed a socket that is bound already.
    """
    family, _, _, _, place = socket.getaddrinfo(host_name, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind(place)
        listener.listen(BACKLOG)
        ip, port = listener.getsockname()[:2]
        ours.hosted |= {(ip, port)}
        store = await_unless_broken(
            lambda: TCPStore(ip, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.fileno()),
            START_S,
            "starting the store",
        )
    except BaseException:
        listener.close()
        raise
    listener.detach()  # the store's own from here on
    return store, f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def _reach_store(ours: Ours, address: str, timeout_s: float) -> TCPStore:
    """A client of the store at `address` (host:port).

    Raises `OSError` if nobody listens there, `torch.distributed.DistNetworkError` if it does not answer, `Abandoned`
    if it was broken or took too long.
    """
    name, _, port = address.rpartition(":")
    name = name.strip("[]")
    # torch tries again and again until the timeout, even if the host is gone: ask once ourselves.
    with socket.create_connection((name, int(port)), timeout=timeout_s) as probe:
        ours.store = plain_address(probe.getpeername())
    ip = ours.store[0]
    timeout = timedelta(seconds=timeout_s)
    return await_unless_broken(
        lambda: TCPStore(ip, int(port), is_master=False, timeout=timeout), timeout_s, "connecting to the store"
    )


# ---------------------------------------------------------------- a replacement, alone


def init_replacement(
    backend: str | None,
    *,
    rank: int,
    world_size: int,
    timeout: timedelta | None = None,
    host: str | None = None,
    **options: Any,
) -> None:
    """Initialise torch.distributed for this rank with nobody else there.

    Groups, DDP and DeviceMesh can be made and used; collectives do nothing until the first `reconfigure`. `host`: where
    this worker's Gloo devices listen (default: the interface in GLOO_SOCKET_IFNAME, else loopback). `options`: more
    arguments of `init_process_group` (`pg_options`, `device_id`). Raises `ValueError` for a backend that cannot be
    reconfigured, and whatever torch raises.
    """
    _process.cover_forks()
    _process.backends.alone = True
    _process.backends.host = host
    _process.backends.install()
    _process.backends.prepare(backend)
    _init_process_group(backend, store=HashStore(), rank=rank, world_size=world_size, timeout=timeout, **options)


def init_as_torch(backend: str, **given: Any) -> None:
    """Initialise torch.distributed as the script asks: its backend is none of those that can be reconfigured."""
    _process.cover_forks()
    _process.backends.alone = False  # whoever it meets, it meets now
    _process.backends.install()
    _init_process_group(backend, **given)


def protect() -> None:
    """The script joins: what can be reconfigured is protected. Raises `RefusedError` if a group cannot be.

    Until now such groups were the script's own affair, and did what they do under torchrun.
    """
    default = c10d._get_default_group()
    for group, config in foreign.groups():
        if group is default:
            raise RefusedError(*foreign.refusal(config, group.size(), default=True))
        if foreign.communicates(config, group.size()):
            raise RefusedError(*foreign.refusal(config, group.size()))
    _process.backends.protects = True


# ---------------------------------------------------------------- reconfiguring


def reconfigure(store: Store, *, generation: int, timeout_s: float, keys: str | None = None) -> None:
    """Tear down the backends of all groups of this process, and connect new ones through `store`.

    Every rank calls it, with the same generation and a client of the same store. The groups stay the same objects:
    default group first, then in the order in which they were made. Ends with a proof: an all-reduce over the default
    group. Raises `ReconfigureError` if it fails, is broken, or takes longer than `timeout_s`; it may then be called
    again with a later generation. `keys`: the prefix of all keys in the store (default: made of the generation).
    """
    deadline = time.monotonic() + timeout_s
    process = _process
    shared = PrefixStore(f"torchrelay/{generation}" if keys is None else keys, store)
    try:
        wirings = process.backends.survey()
        if not wirings:
            raise ValueError("torch.distributed is not initialised: call init_replacement first")
        process.aborts.finish(deadline)
        process.ours.break_backends()  # a backend with a collective in flight could not be let go of
        process.backends.counts.clear()
        process.backends.alone = True
        let_go = [process.backends.take(group) for group in wirings]
        connected = await_unless_broken(
            lambda: _connect(wirings, let_go, shared, deadline), timeout_s, f"connecting generation {generation}"
        )
        c10d._world.group_count = connected.group_count
        process.ours.peers = connected.peers
        for group, wiring in wirings.items():
            backends = connected.backends[wiring.name]
            process.backends.put(group, wiring, backends, PrefixStore(wiring.name, shared))
            if wiring.default:
                proof = [types[0] for types in wiring.kinds.values()]
        for kind in proof:
            _prove(kind, deadline)
        process.ours.silence()  # Gloo has had the time to close what it can close
        process.backends.alone = False
    except (Abandoned, ValueError, RuntimeError) as error:
        # RuntimeError: Gloo raises nothing more precise, and torch's own errors derive from it
        raise ReconfigureError(f"generation {generation}: {error}") from error


class _Connected(NamedTuple):
    """What a generation has brought, before anything is changed by it."""

    backends: dict[str, dict[str, Backend]]  # by name of group, by kind
    peers: frozenset[Address]
    group_count: int


def _connect(
    wirings: dict[dist.ProcessGroup, Wiring],
    let_go: list[Callable[[], object]],
    shared: Store,
    deadline: float,
) -> _Connected:
    """Let go of what was, meet the others, connect.

    Runs in a thread of its own, which may be left behind: it changes nothing that a later generation could see.
    """
    _let_go(let_go)
    world = next(wiring for wiring in wirings.values() if wiring.default)
    made = {wiring.name: wiring.ranks for wiring in wirings.values()}
    roll = PrefixStore("roll", shared)
    # A rank whose script made fewer groups so far must not use a name again.
    group_count = call_roll(roll, world.rank, len(world.ranks), made, c10d._world.group_count)
    peers = _process.backends.exchange(shared, world.rank, world.ranks)
    backends = {}
    for wiring in wirings.values():
        if time.monotonic() >= deadline:
            raise Abandoned("connecting took too long")
        backends[wiring.name] = _process.backends.connect(wiring, PrefixStore(wiring.name, shared))
    return _Connected(backends, peers, group_count)


def _let_go(releases: list[Callable[[], object]]) -> None:
    """Let go of the old backends, in a thread of its own that is left behind if it takes long.

    Now and then Gloo keeps a collective in flight although all its connections are shut down, and its end waits for
    that collective's timeout, which is half an hour by default. Nobody who connects anew needs to wait for it.
    """

    def work() -> None:
        for release in releases:
            release()

    thread = threading.Thread(target=work, name="torchrelay lets go of old backends", daemon=True)
    thread.start()
    thread.join(RELEASE_S)


def _prove(kind: str, deadline: float) -> None:
    """An all-reduce over the default group: everybody is connected and knows it before the script goes on.

    NCCL connects in it, on the rank's device. Before `protect()` the script may not have chosen one, as under torchrun,
    where `init_process_group` connects nothing. NCCL cannot be interrupted while it connects, so a thread does it.
    """
    if kind == "cpu":
        _sum_ones(torch.device(kind), deadline)
    elif _process.backends.protects:
        own, remaining = device.own(), max(0.1, deadline - time.monotonic())
        await_unless_broken(lambda: _sum_ones(own, deadline), remaining, "the proof of new connections")


def _sum_ones(on: torch.device, deadline: float) -> None:
    group = c10d._get_default_group()
    one = torch.ones(1, dtype=torch.int32, device=on)
    group.allreduce([one]).wait(timedelta(seconds=max(0.1, deadline - time.monotonic())))
    if one.item() != group.size():
        raise ValueError(f"an all-reduce of ones over {group.size()} ranks came to {one.item()}")


# ---------------------------------------------------------------- from the control thread


def break_connections() -> int:
    """Make whoever is blocked in a collective, in connecting or in the store fail now. Returns how many were broken.

    From any thread, at any time, and to be called again while somebody is blocked: a connection over which something
    flows is left for the next time. Only our own connections: listeners and the script's sockets are left alone. The
    groups stay unusable until the next `reconfigure`.
    """
    ours = _process.ours
    return abandon.break_all() + ours.break_store() + ours.break_still() + _process.aborts.begin()


def silence() -> None:
    """What was cut short keeps no thread of Gloo busy. By the main thread, when nobody waits in a collective."""
    _process.ours.silence()


def timeout_s() -> float:
    """How long a collective of the default group may take, as of the last `reconfigure`."""
    return _process.backends.timeout_s(c10d._get_default_group())


def collectives() -> int:
    """How many collectives this rank has begun in the default group in this generation. From any thread."""
    return _process.backends.counts.default()


def begun_elsewhere() -> list[tuple[int, int]] | None:
    """The same of each other group, with a key that all its members have; see `counts`. From any thread."""
    return _process.backends.counts.others()


def key_of(group: dist.ProcessGroup) -> int | None:
    """The key by which other members know this group, 0 for the default one; None if it is not counted."""
    return _process.backends.counts.key(group)


def count_aside(number: int) -> None:
    """So many of what the default group counts shall not be; less than 0: so many more. By the main thread alone."""
    _process.backends.counts.set_aside(number)


# ---------------------------------------------------------------- errors of broken communication

# torch has exception classes for its stores and for NCCL, but what Gloo raises is a plain RuntimeError, whether it
# comes out of a collective, out of `work.wait()` or out of `backward()`. Its text names Gloo's source, or says one of
# the few things below. Each of them was seen, with torch 2.13:
#
#     a peer was killed, or its connection shut down      [.../gloo/transport/tcp/pair.cc:553] Connection closed by peer
#     ours was shut down by `break_connections`           the same
#     nobody answered within the group's timeout          [.../gloo/transport/tcp/unbound_buffer.cc:78] Timed out
#     monitored_barrier                                   Rank 1 successfully reached monitoredBarrier, but ...
#     the store's client was shut down                    DistNetworkError: Failed to recv, got 0 bytes; Broken pipe
#     the store did not have a key in time                DistStoreError: wait timeout after 1000ms, keys: ...
#     a group whose reconfigure has failed                     No backend type associated with device type cpu
#     a new group was being connected                     Abandoned: connecting a new group was interrupted

_TEXT = re.compile(r"/gloo/(transport|rendezvous)/|monitoredBarrier, but|No backend type associated with device type")
_CHAIN = 16  # exceptions raised while others were handled, looked at; a cycle ends there, too


def is_collective_error(error: BaseException) -> bool:
    """Whether this exception, or one that it was raised from or while handling, says that communication broke."""
    return any(_says_so(one) for one in _chain(error))


def _says_so(error: BaseException) -> bool:
    if isinstance(error, dist.DistError | Abandoned):
        return True
    return isinstance(error, RuntimeError) and _TEXT.search(str(error)) is not None


def _chain(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    for _ in range(_CHAIN):
        if current is None:
            return
        yield current
        # Also what `raise ... from None` hides from people: the step is to be redone all the same.
        current = current.__cause__ if current.__cause__ is not None else current.__context__


# -------------------------------------------------------- python -m torchrelay.worker.process_groups.groups build


def _console(arguments: list[str]) -> int:
    """Compile the extension and try it on a group of one; prints the file. Returns the exit code."""
    if arguments != ["build"]:
        print("usage: python -m torchrelay.worker.process_groups.groups build", file=sys.stderr)
        return 2
    begin = time.monotonic()
    try:
        path: Path = build_extension()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    chosen, reason = swap.load()
    if chosen.name != swap.EXTENSION:
        print(reason, file=sys.stderr)
        return 1
    print(f"{path}  ({time.monotonic() - begin:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(_console(sys.argv[1:]))
