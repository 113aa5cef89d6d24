"""Streams: a sender and a receiver on pretended machines, and what came through when (native/netpath/tests/stream.c).

    binary = build(folder)
    with Wires() as wires, Stream(wires, binary, folder) as stream:
        stream.await_flow(1.0)
        wires.blackhole(1)
        ...
        line = stream.end()
        assert line.wrong_bytes() == 0

The kinds: `netpath`; `plain`, one TCP connection over path 1; `mptcp`, one that may use all paths; `gloo`, torch's,
over path 1. All of them are given the same messages.
"""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.wires import Wires

ROOT = Path(__file__).parents[2]
NETPATH = ROOT / "native" / "netpath"
BIN_S = 0.05  # of the time line, as in stream.c
LOOK_S = 0.02
START_S = 30.0
END_S = 10.0
MESSAGE = 1 << 20


class StreamError(RuntimeError):
    """A stream did not do what it was to do: the text says which, and what it wrote."""


@functools.cache
def compiler() -> str | None:
    """The C compiler: $CC, or what is there."""
    names = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    return next((found for name in names if (found := shutil.which(name))), None)


def build(folder: Path, flags: Sequence[str] = ("-O2",)) -> Path:
    """Compile stream.c and the core into one program. Raises `StreamError` with what the compiler said."""
    if compiler() is None:
        raise StreamError("no C compiler: install gcc or clang, or set CC")
    program = folder / "stream"
    sources = [*sorted(str(path) for path in (NETPATH / "core").glob("*.c")), str(NETPATH / "tests" / "stream.c")]
    words = [compiler() or "", "-std=c11", *flags, "-o", str(program), *sources, "-pthread"]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise StreamError(f"`{' '.join(words)}` failed:\n{done.stderr[-3000:]}")
    return program


# ---------------------------------------------------------------- the time line


class Timeline:
    """What one end has written so far. Times are those of `time.monotonic()`, in seconds."""

    def __init__(self, path: Path) -> None:
        self._path, self._read, self._rest = path, 0, ""
        self.bins: dict[int, int] = {}  # bytes by bin, counted from `first`
        self.first: float | None = None
        self.gaps: list[tuple[float, float]] = []
        self.errors: list[str] = []
        self.counts: list[dict[str, Any]] = []  # of each path
        self.summary: dict[str, Any] | None = None

    def refresh(self) -> Timeline:
        """Read what has been written since."""
        if self._path.exists():
            with self._path.open() as file:
                file.seek(self._read)
                lines = (self._rest + file.read()).split("\n")
                self._read, self._rest = file.tell(), lines[-1]
            for line in lines[:-1]:
                self._take(json.loads(line))
        return self

    def _take(self, line: dict[str, Any]) -> None:
        match line["what"]:
            case "rate":
                self.first = line["t"] if self.first is None else self.first
                self.bins[round((line["t"] - self.first) / BIN_S)] = line["bytes"]
            case "gap":
                self.gaps.append((line["from"], line["to"]))
            case "error":
                self.errors.append(line["text"])
            case "path":
                self.counts.append(line)
            case "end":
                self.summary = line

    @property
    def until(self) -> float:
        """What was before this time is known."""
        return -math.inf if self.first is None else self.first + (max(self.bins) + 1) * BIN_S

    def seconds(self) -> float:
        """How long bytes have been coming."""
        return 0.0 if self.first is None else self.until - self.first

    def gbps(self, begin: float, until: float) -> float:
        """The rate between two times, of whole bins; 0 if there is none between them."""
        if self.first is None:
            return 0.0
        first, last = math.ceil((begin - self.first) / BIN_S), math.floor((until - self.first) / BIN_S)
        if last <= first:
            return 0.0
        return sum(self.bins.get(one, 0) for one in range(first, last)) * 8 / ((last - first) * BIN_S) / 1e9

    def stall_ms(self, begin: float, until: float, *, running: bool = False) -> float:
        """The longest time without progress that touches this time; 10, if none was longer than that. If the stream is
        `running`, the time until now for which nothing is known counts, too: it may have stalled for good.
        """
        lengths = [end - start for start, end in self.gaps if end > begin and start < until]
        if running and (now := time.monotonic()) - self.until > 4 * BIN_S:
            lengths.append(now - self.until)
        return round(max(lengths, default=0.01) * 1e3, 1)

    def resumed(self, since: float) -> float | None:
        """Seconds from then until something was done; None: nothing yet. 0: there was no gap."""
        over = [end - since for start, end in self.gaps if start < since < end]
        return over[0] if over else 0.0 if self.until > since + BIN_S else None

    def full_again(self, since: float, gbps: float, window: float = 0.5) -> float | None:
        """Seconds from then until a time after which this rate is held for `window`; None: it is not yet."""
        if self.first is None:
            return None
        one = math.ceil((since - self.first) / BIN_S)
        while (begin := self.first + one * BIN_S) + window <= self.until:
            if self.gbps(begin - 1e-6, begin + window + 1e-6) >= gbps:
                return round(max(begin - since, 0.0), 3)
            one += 1
        return None

    def wrong_bytes(self) -> int:
        """Raises `StreamError` if the end did not say it."""
        if self.summary is None:
            raise StreamError(f"{self._path} has no end: {'; '.join(self.errors) or 'it was killed'}")
        return int(self.summary["wrong_bytes"])

    def total(self, counter: str) -> int:
        """A counter, over all paths."""
        return sum(int(one[counter]) for one in self.counts)


# ---------------------------------------------------------------- the stream


class Stream:
    """From machine a to machine b, until `end`."""

    def __init__(
        self,
        wires: Wires,
        program: Path,
        folder: Path,
        kind: str = "netpath",
        *,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        paths: Sequence[int] | None = None,
    ) -> None:
        """`flags` of stream.c; `paths`: only these (netpath)."""
        self.kind, self._folder, self._wires = kind, folder, wires
        self._name = f"{kind}-{time.monotonic_ns()}"
        interfaces = ",".join(f"eth{path}" for path in paths or wires.paths)
        self._env = {"TORCHRELAY_NET_PATHS": interfaces, "GLOO_SOCKET_IFNAME": "eth1", **(env or {})}
        self.receiver = self._start("b", "recv", program, flags)
        self.sender = self._start("a", "send", program, flags)
        self.received, self.sent = (Timeline(self._file(role, "jsonl")) for role in ("recv", "send"))

    def _file(self, role: str, kind: str) -> Path:
        return self._folder / f"{self._name}.{role}.{kind}"

    def _start(self, machine: str, role: str, program: Path, flags: Sequence[str]) -> subprocess.Popen[Any]:
        words = [str(program)]
        if self.kind == "gloo":
            words = [sys.executable, str(ROOT / "bench" / "gloo_stream.py")]
        words += [role, str(self._folder / f"{self._name}.meet"), *flags]
        if self.kind in ("plain", "mptcp"):
            words += [f"--{self.kind}", self._wires.address(machine, 1)]
        with self._file(role, "jsonl").open("wb") as out, self._file(role, "err").open("wb") as errors:
            return self._wires.start(machine, words, self._env, out, errors)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self.sender, self.receiver):
            if process.poll() is None:
                process.kill()
            process.wait()

    def error(self) -> str:
        """What failed, in the words of whoever met it; empty if nothing did."""
        for role, process, line in (("recv", self.receiver, self.received), ("send", self.sender, self.sent)):
            if line.refresh().errors:
                return f"{role}: {line.errors[0]}"
            wrong = line.summary is not None and line.summary["wrong_bytes"]
            if process.poll() and not wrong:
                said = self._file(role, "err").read_text(errors="replace").strip()
                return f"{role} ended with {process.returncode}: {said[-500:]}"
        return ""

    def await_that(self, fact: Callable[[Timeline], bool], limit_s: float, what: str) -> Timeline:
        """Wait until this is true of what was received. Raises `StreamError` after `limit_s`, or if an end failed."""
        until = time.monotonic() + limit_s
        while not fact(self.received.refresh()):
            if error := self.error():
                raise StreamError(f"{self.kind}: {error}, before {what}")
            if time.monotonic() > until:
                raise StreamError(f"{self.kind}: not within {limit_s:g} s: {what}")
            time.sleep(LOOK_S)
        return self.received

    def await_flow(self, seconds: float) -> Timeline:
        """Wait until bytes have been coming for so long."""
        return self.await_that(lambda line: line.seconds() >= seconds, START_S + seconds, f"{seconds:g} s of messages")

    def await_more(self, limit_s: float = START_S) -> float:
        """Wait for progress from now on. Returns how long it took, in seconds."""
        since = time.monotonic()
        self.await_that(lambda line: line.until > since + BIN_S, limit_s, "more messages")
        return self.received.resumed(since) or 0.0

    def end(self, limit_s: float = END_S) -> Timeline:
        """Tell the sender to end, and wait for both. Returns the receiver's time line. Raises `StreamError`."""
        self.sender.send_signal(signal.SIGTERM)
        until = time.monotonic() + limit_s
        for process in (self.sender, self.receiver):
            try:
                process.wait(max(until - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                raise StreamError(f"{self.kind}: no end within {limit_s:g} s of being told") from None
        if error := self.error():
            raise StreamError(f"{self.kind}: {error}")
        sent, received = self.sent.refresh().summary, self.received.refresh().summary
        if sent is None or received is None or not received["complete"] or sent["messages"] != received["messages"]:
            raise StreamError(f"{self.kind}: sent {sent}, received {received}: messages are lost, or came twice")
        return self.received
