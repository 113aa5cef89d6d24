"""The stores at which workers find each other: one hosts, all connect."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from torchrelay.worker.process_groups.abandon import await_unless_broken
from torchrelay.worker.process_groups.sockets import Ours, plain_address

START_S = 60.0
BACKLOG = 1024  # connections that wait for the store's thread: as many as there are ranks may come at once


def host(ours: Ours, host_name: str) -> tuple[TCPStore, str]:
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


def connect(ours: Ours, address: str, timeout_s: float) -> TCPStore:
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
