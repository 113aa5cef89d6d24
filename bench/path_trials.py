"""Trials of the bench netpath: a stream over two paths, a fault, and what came of it, for each kind of stream."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tests.support.path_faults import PathFault
from tests.support.streams import Stream, StreamError, Timeline
from tests.support.wires import Wires

# What TCP carries of 1 Gb/s in packets of 1500 bytes (with 66 of headers and 14 + 4 on the wire), measured by iperf3.
LINE_GBPS = 0.957
RATE = "1gbit"
OURS = "netpath"
ON_ONE_PATH = ("gloo", "plain")
BEFORE_S = 1.5  # of undisturbed messages
FULL = 0.95  # of the rate before the fault
SETTLE_S = 0.4  # after a fault, before the rate is taken


@dataclass
class Outcome:
    """What came of one trial. Times in seconds, or as their names say; None: it did not come to that."""

    trial: str
    kind: str
    before_gbps: float = 0.0
    stall_ms: float | None = None
    share: float | None = None  # of what the paths that were left could carry
    resumed_s: float | None = None
    full_s: float | None = None
    wrong_bytes: int = 0
    error: str = ""
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """Where, and how thoroughly."""

    program: Path
    folder: Path

    def stream(self, wires: Wires, kind: str, **more: Any) -> Stream:
        """A stream of this kind; `mptcp_patient` is MPTCP with the settings that suit it."""
        if kind.startswith("mptcp"):
            wires.multipath_tcp(patient=kind == "mptcp_patient")
        return Stream(wires, self.program, self.folder, "mptcp" if kind.startswith("mptcp") else kind, **more)

    def trial(
        self,
        name: str,
        kind: str,
        disturb: Callable[[Wires, Stream, Outcome], None],
        *,
        switched: bool = False,
        env: dict[str, str] | None = None,
    ) -> Outcome:
        """A stream, undisturbed for a while, then what `disturb` does to it, then its end."""
        outcome = Outcome(name, kind)
        with Wires(rate=RATE, switched=switched) as wires, self.stream(wires, kind, env=env) as stream:
            try:
                line = stream.await_flow(BEFORE_S)
                assert line.first is not None
                outcome.before_gbps = round(line.gbps(line.first, line.until), 4)
                disturb(wires, stream, outcome)
                outcome.wrong_bytes = stream.end(30.0).wrong_bytes()
            except StreamError as error:
                outcome.error = str(error)[:300]
                outcome.wrong_bytes = int((stream.received.refresh().summary or {}).get("wrong_bytes", 0))
            if kind == OURS and not outcome.error:
                sent, received = stream.sent, stream.received
                outcome.more |= {name: received.total(name) for name in ("duplicates", "corrupt")}
                outcome.more |= {name: sent.total(name) for name in ("downs", "sent_again")}
        return outcome

    def fault(self, name: str, kind: str, fault: PathFault, hold_s: float, limit_s: float = 20.0) -> Outcome:
        """One fault for so long, and then up to `limit_s` until the rate is what it was."""

        def disturb(wires: Wires, stream: Stream, outcome: Outcome) -> None:
            struck = time.monotonic()
            fault.strike(wires, stream)
            time.sleep(hold_s)
            outcome.more["hits"] = wires.hits(1)
            taken_back = time.monotonic()
            fault.heal(wires, stream)
            try:
                await_full(stream, outcome, taken_back, limit_s)
            finally:
                line = stream.received
                outcome.stall_ms = line.stall_ms(struck, time.monotonic(), running=True)
                carries = fault.carries - (kind in ON_ONE_PATH)
                if carries > 0 and hold_s > SETTLE_S:
                    outcome.share = round(line.gbps(struck + SETTLE_S, taken_back) / LINE_GBPS / carries, 3)

        return self.trial(name, kind, disturb, switched=fault.switched, env=dict(fault.env))

    def both_down(self, name: str, kind: str, how: str, down_s: float, limit_s: float = 60.0) -> Outcome:
        """No path for so long, then path 1 is back, and when messages go on, path 2."""

        def set_path(wires: Wires, path: int, up: bool) -> None:
            if how == "links":
                wires.link("a", path, up)
            elif up:
                wires.heal(path)
            else:
                wires.blackhole(path)

        def disturb(wires: Wires, stream: Stream, outcome: Outcome) -> None:
            struck = time.monotonic()
            for path in wires.paths:
                set_path(wires, path, up=False)
            time.sleep(down_s)
            taken_back = time.monotonic()
            set_path(wires, 1, up=True)
            await_more(stream, outcome, taken_back, limit_s)
            second = time.monotonic()
            set_path(wires, 2, up=True)
            await_full(stream, outcome, second, limit_s)
            outcome.stall_ms = stream.received.stall_ms(struck, time.monotonic())

        return self.trial(name, kind, disturb)

    def storm(self, name: str, kind: str, seed: int, flaps: int, limit_s: float = 45.0) -> Outcome:
        """Links go down and up at random, one after the other."""

        def disturb(wires: Wires, stream: Stream, outcome: Outcome) -> None:
            struck = time.monotonic()
            wires.storm(seed, flaps)
            over = time.monotonic()
            await_full(stream, outcome, over, limit_s)
            line = stream.received
            outcome.stall_ms = line.stall_ms(struck, time.monotonic())
            outcome.share = round(line.gbps(struck, over) / LINE_GBPS, 3)

        return self.trial(name, kind, disturb)

    def undisturbed(
        self,
        name: str,
        kind: str,
        seconds: float,
        rate: str | None = RATE,
        flags: tuple[str, ...] = (),
        paths: tuple[int, ...] = (1, 2),
    ) -> Outcome:
        """Nothing happens; the rate is that of `seconds`, after some time to begin."""
        outcome = Outcome(name, kind)
        with Wires(rate=rate) as wires, self.stream(wires, kind, flags=flags, paths=paths) as stream:
            try:
                line = stream.await_flow(seconds + SETTLE_S)
                assert line.first is not None
                outcome.before_gbps = round(line.gbps(line.first + SETTLE_S, line.until), 4)
                line = stream.end()
                outcome.wrong_bytes = line.wrong_bytes()
                outcome.stall_ms = line.stall_ms(0.0, line.until)
                outcome.more |= cost(stream, line)
            except StreamError as error:
                outcome.error = str(error)[:300]
        return outcome


def cost(stream: Stream, line: Timeline) -> dict[str, Any]:
    """Processor time of both ends for 1 GB, and time for a message."""
    received, sent = line.summary or {}, stream.sent.summary or {}
    gigabytes = received["bytes"] / 1e9
    return {
        "cpu_s_per_gb": round((received["cpu_s"] + sent["cpu_s"]) / gigabytes, 3) if gigabytes else None,
        "message_us": round(received["seconds"] / max(received["messages"], 1) * 1e6, 2),
    }


def await_more(stream: Stream, outcome: Outcome, since: float, limit_s: float) -> None:
    """Wait for the first message since then."""
    line = stream.await_that(lambda line: line.resumed(since) is not None, limit_s, "a message after the fault")
    outcome.resumed_s = round(line.resumed(since) or 0.0, 3)


def await_full(stream: Stream, outcome: Outcome, since: float, limit_s: float) -> None:
    """Wait until the rate is what it was before."""
    wanted = FULL * outcome.before_gbps

    def full(line: Timeline) -> bool:
        return line.full_again(since, wanted) is not None

    line = stream.await_that(full, limit_s, "the rate of before the fault")
    outcome.full_s = line.full_again(since, wanted)
    if outcome.resumed_s is None:
        outcome.resumed_s = round(line.resumed(since) or 0.0, 3)


def iperf3(seconds: int, streams: int = 1) -> float:
    """The rate of iperf3 over one path without a limit, in Gb/s."""
    with Wires(rate=None, paths=1) as wires:
        server = wires.start("b", ["iperf3", "-s", "-1", "--forceflush"], stdout=subprocess.PIPE)
        assert server.stdout is not None
        while b"listening" not in server.stdout.readline():
            if server.poll() is not None:
                raise StreamError(f"iperf3 -s ended with {server.returncode}")
        words = ["iperf3", "-J", "-t", str(seconds), "-P", str(streams), "-c", wires.address("b", 1)]
        client = wires.start("a", words, stdout=subprocess.PIPE)
        said = json.loads(client.communicate(timeout=seconds + 20)[0])
        server.stdout.close()
    return round(float(said["end"]["sum_received"]["bits_per_second"]) / 1e9, 3)


def middle(values: list[float]) -> float:
    return round(median(values), 4)
