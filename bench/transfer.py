"""Transfer: 1 GB of state from one machine to another, encrypted and plain, beside one plain TCP stream (root, Linux).

    make bench NAME=transfer

Two machines of the tests' harness, each with a network, processes and memory of its own, joined by a switch; without
root it is this machine's loopback, and `between` says so. One source serves, through our own state server; the other
takes, digest included. All three ways go in turns in one run; the first turn is a warm-up and left out.

tls_ratio, plain_ratio       bytes a second over those of the plain stream, medians; *_least, *_most: of single turns
tls_over_plain               what encryption leaves of our own plain transfer
NAME_gb_per_s                of the stream, our plain transfer, and TLS; *_least, *_most: the spread over the turns
NAME_cpu_s_per_gb            processor time of both ends together, median
connection_ms, connection_tls_ms    a record of 100 bytes, on a connection of its own, median
certificate_ms               what a worker does at its start, once `cryptography` is imported, median
first_certificate_ms         the same with that import
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from figures import finish, progress

sys.path.append(str(Path(__file__).parent.parent))  # the machines are the tests', too

from tests.support.machines.harness import Machines
from tests.support.machines.needs import obstacle

REPOSITORY = Path(__file__).resolve().parents[1]
CHUNK = 1 << 20
GENERATION, STEP = 1, 1
CONNECTIONS = 40
WAYS = ("stream", "plain", "tls")


class Peer:
    """A process on a machine, asked and answering in lines of JSON."""

    def __init__(self, start: Callable[..., Any], words: Sequence[str]) -> None:
        self.process = start(
            [sys.executable, str(Path(__file__).resolve()), *words],
            env={**os.environ, "TORCHRELAY_NEIGHBOURS": "0", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def ask(self, question: object) -> Any:
        """Its answer. Raises `RuntimeError` if it has ended; why it has printed itself."""
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError("a peer has ended")
        return json.loads(answer)

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait(30)


# ---------------------------------------------------------------- on the machines


def serve(host: str) -> None:
    """The source: says where it is, and serves until its input ends; a stream when it is asked for one."""
    from restore import build
    from torchrelay.protocol.messages.ids import Generation, Point
    from torchrelay.worker.transfer.serving import StateServer
    from torchrelay.worker.transfer.tls import Tls

    asked = json.loads(sys.stdin.readline())
    state = build(asked["gigabytes"], trained=True)
    found = {}
    for way, tls in (("plain", None), ("tls", Tls())):
        server = StateServer(bytes.fromhex(asked["secret"]), host, tls=tls)
        server.publish(Generation(GENERATION), Point(STEP), lambda: bytes(100), state)
        found[way] = server.address
    listening = socket.create_server((host, 0))
    found["stream"] = f"{host}:{listening.getsockname()[1]}"
    print(json.dumps(found), flush=True)
    for line in sys.stdin:
        size = json.loads(line)
        memory = memoryview(bytearray(b"\1") * (size or 0))
        print(json.dumps(time.process_time()), flush=True)
        if size is None:
            continue
        connected, _ = listening.accept()
        with connected:
            for at in range(0, len(memory), CHUNK):
                connected.sendall(memory[at : at + CHUNK])


def take() -> None:
    """Who takes what it is told from where it is told, and says how long that took."""
    from restore import build
    from torchrelay.worker.transfer.tls import Tls

    asked = json.loads(sys.stdin.readline())
    taker = Taker(build(asked["gigabytes"], trained=False), bytes.fromhex(asked["secret"]), Tls())
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        what, way, address = json.loads(line)
        print(json.dumps(getattr(taker, what)(way, address)), flush=True)


class Taker:
    """What can be taken."""

    def __init__(self, state: Any, secret: bytes, tls: Any) -> None:
        self.state, self.secret, self.tls = state, secret, tls

    def transfer(self, way: str, address: str) -> dict[str, object]:
        """A state."""
        from torchrelay.protocol.messages.ids import Generation, Point, Rank
        from torchrelay.protocol.messages.orders import Source
        from torchrelay.worker.transfer.transfer import fetch_state

        spent = time.process_time()
        got = fetch_state(
            [Source(Rank(0), address)],
            self.secret,
            Generation(GENERATION),
            Point(STEP),
            self.state,
            timeout_s=120,
            tls=self.tls if way == "tls" else None,
        )
        cpu_s = time.process_time() - spent
        return {"took_s": got.took_s, "cpu_s": cpu_s, "size": got.size, "digest": got.digest}

    def stream(self, size: str, address: str) -> dict[str, object]:
        """As many bytes over one connection, into memory that is there."""
        memory = memoryview(bytearray(b"\1") * int(size))
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port))) as connected:
            spent, begun, at = time.process_time(), time.perf_counter(), 0
            while at < len(memory):
                at += connected.recv_into(memory[at : at + CHUNK])
            return {"took_s": time.perf_counter() - begun, "cpu_s": time.process_time() - spent, "size": at}

    def connections(self, way: str, address: str) -> dict[str, object]:
        """Small ones, one after the other."""
        from torchrelay.protocol.messages.ids import Generation, Point, Rank
        from torchrelay.protocol.messages.orders import Source
        from torchrelay.worker.transfer.transfer import fetch_record

        took = []
        for _ in range(CONNECTIONS):
            begun = time.perf_counter()
            fetch_record(
                [Source(Rank(0), address)],
                self.secret,
                Generation(GENERATION),
                Point(STEP),
                tls=self.tls if way == "tls" else None,
            )
            took.append(time.perf_counter() - begun)
        return {"took_ms": 1000 * statistics.median(took[1:])}


def certificates() -> None:
    """What a worker pays at its start: in a process of its own, as the first one is dearer."""
    import torch  # noqa: F401  a worker has it, and with it ssl

    from torchrelay.worker.transfer.tls import Tls

    took = []
    for _ in range(20):
        begun = time.perf_counter()
        Tls()
        took.append(1000 * (time.perf_counter() - begun))
    print(json.dumps({"first_certificate_ms": took[0], "certificate_ms": statistics.median(took[1:])}))


# ---------------------------------------------------------------- the driver


@contextmanager
def two_machines() -> Iterator[tuple[list[Callable[..., Any]], str, str]]:
    """How processes are started on each, the source's address, and what is between the two."""
    why = obstacle()
    if why:
        progress(f"no machines ({why}): over loopback")
        yield [lambda words, **given: subprocess.Popen(words, text=True, **given)] * 2, "127.0.0.1", "loopback"
        return
    with Machines(2, visible=[REPOSITORY]) as machines:
        yield [one.popen for one in machines], machines[0].address, "two machines"


def measure(gigabytes: float, rounds: int) -> tuple[dict[str, object], str]:
    asked = {"gigabytes": gigabytes, "secret": os.urandom(32).hex()}
    with two_machines() as (starts, host, between), ExitStack() as stack:
        source, taker = Peer(starts[0], ["--serve", host]), Peer(starts[1], ["--take"])
        for peer in (source, taker):
            stack.callback(peer.end)
        where = source.ask(asked)
        taker.ask(asked)
        size = taker.ask(("transfer", "plain", where["plain"]))["size"]
        found: dict[str, list[Any]] = {way: [] for way in WAYS}
        for number in range(rounds + 1):
            # Who is first changes, so that drift favours nobody.
            for way in WAYS[number % 3 :] + WAYS[: number % 3]:
                begun = source.ask(size if way == "stream" else None)
                what = ("stream", str(size)) if way == "stream" else ("transfer", way)
                found[way].append(taker.ask((*what, where[way])))
                found[way][-1]["cpu_s"] += source.ask(None) - begun
            progress(f"round {number}: " + ", ".join(f"{way} {found[way][-1]['took_s']:.3f} s" for way in WAYS))
        if len({one["digest"] for way in ("plain", "tls") for one in found[way]}) != 1:
            raise RuntimeError("the digests of the state differ")
        figures = figures_of({way: [one["took_s"] for one in took[1:]] for way, took in found.items()}, size)
        for way, took in found.items():
            figures[f"{way}_cpu_s_per_gb"] = statistics.median(one["cpu_s"] for one in took[1:]) * 1e9 / size
        for way, name in (("plain", "connection_ms"), ("tls", "connection_tls_ms")):
            figures[name] = taker.ask(("connections", way, where[way]))["took_ms"]
    told = subprocess.run([sys.executable, __file__, "--certificates"], check=True, capture_output=True, text=True)
    return {**figures, **json.loads(told.stdout)}, between


def figures_of(took: dict[str, list[float]], size: int) -> dict[str, object]:
    """`took`: seconds of each turn, by way."""
    middle = {way: statistics.median(each) for way, each in took.items()}
    figures: dict[str, object] = {"tls_over_plain": middle["plain"] / middle["tls"], "state_gb": size / 1e9}
    for way in ("tls", "plain"):
        turns = [stream / own for stream, own in zip(took["stream"], took[way], strict=True)]
        figures[f"{way}_ratio"] = middle["stream"] / middle[way]
        figures[f"{way}_ratio_least"], figures[f"{way}_ratio_most"] = min(turns), max(turns)
    for way in WAYS:
        figures[f"{way}_gb_per_s"] = size / middle[way] / 1e9
        figures[f"{way}_gb_per_s_least"] = size / max(took[way]) / 1e9
        figures[f"{way}_gb_per_s_most"] = size / min(took[way]) / 1e9
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--short", action="store_true", help="a quarter of a GB, two rounds")
    parser.add_argument("--serve", metavar="HOST", help=argparse.SUPPRESS)
    parser.add_argument("--take", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--certificates", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve)
    if options.take:
        return take()
    if options.certificates:
        return certificates()
    gigabytes, rounds = (0.25, 2) if options.short else (options.gigabytes, options.rounds)
    figures, between = measure(gigabytes, rounds)
    return finish("transfer", figures, between=between, rounds=rounds)


if __name__ == "__main__":
    main()
