"""What native/netpath/tests/stream.c does, over torch's Gloo: messages one way, checked, with the same time line.

    python bench/gloo_stream.py recv|send MEET [--size BYTES] [--outstanding N]

MEET is the file by which the two find one another; GLOO_SOCKET_IFNAME says over which interface. It ends at SIGTERM, or
when the sender says so.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import time
from collections import deque
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

BIN_S, GAP_S = 0.05, 0.01
LAST = -1  # the stamp of the last message
TIMEOUT = timedelta(minutes=10)


class Line:
    """The time line."""

    def __init__(self) -> None:
        self.first = self.last = self.bin = time.monotonic()
        self.recent = self.bytes = self.messages = self.wrong = 0
        self.longest = 0.0

    def tell(self, **words: object) -> None:
        print(json.dumps(words), flush=True)

    def done(self, size: int) -> None:
        now = time.monotonic()
        if now >= self.bin + BIN_S:
            if self.recent:
                self.tell(what="rate", t=self.bin, bytes=self.recent)
            self.recent = 0
            self.bin += (now - self.bin) // BIN_S * BIN_S
        if now - self.last > GAP_S:
            self.tell(what="gap", **{"from": self.last, "to": now})
        self.longest = max(self.longest, now - self.last)
        self.last = now
        self.recent += size
        self.bytes += size
        self.messages += 1

    def end(self) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = self.last - self.first
        if self.recent:
            self.tell(what="rate", t=self.bin, bytes=self.recent)
        self.tell(
            what="end",
            complete=True,
            messages=self.messages,
            bytes=self.bytes,
            seconds=seconds,
            gbps=self.bytes * 8 / max(seconds, 1e-9) / 1e9,
            wrong_bytes=self.wrong,
            wrong_messages=self.wrong,
            longest_gap_ms=self.longest * 1e3,
            cpu_s=used.ru_utime + used.ru_stime,
        )


def text(size: int) -> torch.Tensor:
    """Of all messages; their first eight bytes are the number of the message."""
    return torch.randint(0, 1 << 60, (max(size // 8, 1),), generator=torch.Generator().manual_seed(0))


def send(line: Line, size: int, outstanding: int) -> None:
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    buffers = [text(size) for _ in range(outstanding)]
    under_way: deque[dist.Work] = deque()
    number = 0
    while not stopped or under_way:
        if not stopped and len(under_way) < outstanding:
            buffers[number % outstanding][0] = number
            work = dist.isend(buffers[number % outstanding], 1)
            assert work is not None
            under_way.append(work)
            number += 1
            continue
        under_way.popleft().wait()
        line.done(size)
    buffers[0][0] = LAST
    dist.send(buffers[0], 1)


def receive(line: Line, size: int, outstanding: int) -> None:
    wanted = text(size)
    buffers = [torch.zeros_like(wanted) for _ in range(outstanding)]
    under_way: deque[dist.Work] = deque()

    def post(number: int) -> None:
        work = dist.irecv(buffers[number % outstanding], 0)
        assert work is not None
        under_way.append(work)

    for number in range(outstanding):
        post(number)
    number = 0
    while True:
        under_way.popleft().wait()
        got = buffers[number % outstanding]
        if int(got[0]) == LAST:
            return
        line.done(size)
        wanted[0] = number
        if not torch.equal(got, wanted):
            line.wrong += 8 * int((got != wanted).sum())
        number += 1
        post(number - 1 + outstanding)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=("recv", "send"))
    parser.add_argument("meet")
    parser.add_argument("--size", type=int, default=1 << 20)
    parser.add_argument("--outstanding", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    store = FileStore(options.meet, 2)
    dist.init_process_group("gloo", store=store, rank=int(options.role == "recv"), world_size=2, timeout=TIMEOUT)
    line = Line()
    try:
        if options.role == "send":
            send(line, options.size, options.outstanding)
            store.wait(["heard"])  # who leaves earlier may take back what is still on its way
        else:
            receive(line, options.size, options.outstanding)
            store.set("heard", "1")
        line.end()
    except RuntimeError as error:
        line.tell(what="error", text=str(error)[:300])
        os._exit(1)
    # What is posted and will never come would keep it from ending.
    os._exit(0)


if __name__ == "__main__":
    main()
