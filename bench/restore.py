"""Restore: the state of a worker from another process, digest included, beside one plain TCP stream.

    make bench NAME=restore

restore_bandwidth_ratio   bytes a second of a restore over those of the plain stream, medians of turns in one run
restore_read_ratio        the same where the state is read out of the other's memory, as on one machine
restore_extra_mb          memory beyond the state itself at the peak, the larger of both sides
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path

from figures import finish, progress

CHUNK = 1 << 20
ROUNDS = 5
WIDTH = 4096


def peak_and_now_mb() -> tuple[float, float]:
    """Peak and present resident memory of this process, in MB."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(int(fields[name].split()[0]) / 1024 for name in ("VmHWM", "VmRSS"))  # type: ignore[return-value]


def reset_peak() -> float:
    """Forget the peak so far; returns the present use in MB."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_and_now_mb()[1]


def build(gigabytes: float, *, trained: bool):  # type: ignore[no-untyped-def]  # noqa: ANN201  torch only in the children
    """A model with AdamW whose state has this size: parameters and two moments."""
    import torch

    from torchrelay.worker.state.state import State

    layers = max(1, round(gigabytes * 2**30 / (3 * 4 * WIDTH * WIDTH)))
    torch.manual_seed(1 if trained else 2)
    model = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
    optimizer = torch.optim.AdamW(model.parameters())
    if trained:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        optimizer.step()
        optimizer.zero_grad()
    return State(model=model, optimizer=optimizer)


def serve(pipe: Connection, gigabytes: float, secret: bytes) -> None:
    """The source: a state server, and a plain stream of the same memory's size."""
    import numpy as np

    from torchrelay.protocol.messages.ids import Generation, Point
    from torchrelay.worker.transfer.serving import StateServer

    state = build(gigabytes, trained=True)
    server = StateServer(secret)
    server.publish(Generation(1), Point(1), None, state)
    before = reset_peak()
    plain = socket.create_server(("127.0.0.1", 0))
    pipe.send((server.address, plain.getsockname()[1]))
    extra = 0.0
    while (size := pipe.recv()) is not None:
        extra = max(extra, peak_and_now_mb()[0] - before)  # of the restore before it: the stream has its own memory
        memory = memoryview(np.ones(size, np.uint8).data)
        connection, _ = plain.accept()
        with connection:
            for at in range(0, size, CHUNK):
                connection.sendall(memory[at : at + CHUNK])
        del memory
        before = reset_peak()
    pipe.send(extra)


def plain_stream(pipe: Connection, port: int, size: int) -> float:
    """Seconds for `size` bytes over one connection, from memory into memory that is there, like a restore."""
    buffer = memoryview(bytearray(b"\1") * size)
    pipe.send(size)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        first = connection.recv_into(buffer[:CHUNK])  # the source had to make its memory first
        at, begin = first, time.perf_counter()
        while at < size:
            at += connection.recv_into(buffer[at : at + CHUNK])
        return time.perf_counter() - begin


def measure(gigabytes: float) -> dict[str, float]:
    """Restores and plain streams in turns; runs in a process of its own."""
    from torchrelay.protocol.messages.ids import Generation, Point, Rank
    from torchrelay.protocol.messages.orders import Source
    from torchrelay.worker.transfer.transfer import fetch_state

    secret = os.urandom(32)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    source = context.Process(target=serve, args=(theirs, gigabytes, secret), daemon=True)
    source.start()
    address, port = pipe.recv()
    state = build(gigabytes, trained=False)
    sent: list[float] = []
    read: list[float] = []
    streams, extra, size = [], 0.0, 0
    for number in range(ROUNDS + 1):
        for way, took in (("0", sent), ("1", read)):
            os.environ["TORCHRELAY_NEIGHBOURS"] = way
            before = reset_peak()
            sources = [Source(Rank(0), address)]
            received = fetch_state(sources, secret, Generation(1), Point(1), state, timeout_s=120)
            size = received.size
            # What the state itself has taken: in the first round the optimizer's moments are allocated.
            grown = 2 / 3 * size / 2**20 if number == 0 and way == "0" else 0.0
            extra = max(extra, peak_and_now_mb()[0] - before - grown)
            took.append(received.took_s)
        streams.append(plain_stream(pipe, port, size))
        progress(f"round {number}: sent {sent[-1]:.3f} s, read {read[-1]:.3f} s, plain stream {streams[-1]:.3f} s")
    pipe.send(None)
    theirs_extra = float(pipe.recv())
    source.join(30)
    # The first round also pays for memory that is touched for the first time.
    restore, stream = statistics.median(sent[1:]), statistics.median(streams[1:])
    return {
        "restore_bandwidth_ratio": stream / restore,
        "restore_read_ratio": stream / statistics.median(read[1:]),
        "restore_gb_per_s": size / restore / 1e9,
        "plain_stream_gb_per_s": size / stream / 1e9,
        "restore_first_s": sent[0],
        "restore_gb": size / 1e9,
        "restore_extra_mb": max(extra, theirs_extra),
    }


def restore_figures(gigabytes: float) -> dict[str, float]:
    """The figures, from a process that is gone afterwards with its gigabytes."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        # Workers of a pool may not have children of their own unless they are told that they may.
        pool.apply(allow_children)
        return pool.apply(measure, (gigabytes,))


def allow_children() -> None:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    options = parser.parse_args()
    finish("restore", restore_figures(options.gigabytes))


if __name__ == "__main__":
    main()
