"""Slices: 1 GB of state from three replicas at once, and from one of them, in turns in one run (root, Linux, `tc`).

    make bench NAME=slices

Each source and the replacement have network namespaces of their own, as nodes of `run --isolate` do; what leaves
a source's link is held at --gbit by a token bucket (tbf), then the same without a limit. Nothing is read from memory.

restore_three_s, restore_one_s     at the limited rate, medians; *_unlimited_s: without (this machine is then the limit)
restore_speedup                    the second over the first
largest_share, smallest_share      of the tensors' bytes by source, over all rounds from three at the limited rate
link_gbit_per_s                    what one source's link carried in a restore from one: the limit, if it was one
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from figures import finish, progress
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.schedulers.network import Isolation, obstacle

SOURCES = 3
GENERATION, STEP = 1, 1


class Peer:
    """A process in the network namespace of its node; asked and answering in lines of JSON."""

    def __init__(self, isolation: Isolation, node: NodeId, words: Sequence[str], log: Path) -> None:
        command = isolation.command(node, [sys.executable, __file__, *words])
        env = {**os.environ, "TORCHRELAY_NEIGHBOURS": "0"}  # as on machines of their own
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self._log = log

    def ask(self, question: object) -> Any:
        """Its answer. Raises `RuntimeError` with what it wrote if there is none."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self._log.stem} has ended: {self._log.read_text()[-2000:]}")
        return json.loads(answer)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


# ---------------------------------------------------------------- in the namespaces


def serve(host: str) -> None:
    """A source: says where it is, and serves until it is killed."""
    from restore import build
    from torchrelay.protocol.messages.ids import Generation, Point
    from torchrelay.worker.transfer.serving import StateServer

    asked = json.loads(sys.stdin.readline())
    state = build(asked["gigabytes"], trained=True)
    server = StateServer(bytes.fromhex(asked["secret"]), host)
    server.publish(Generation(GENERATION), Point(STEP), None, state)
    print(json.dumps(server.address), flush=True)
    sys.stdin.read()


def take() -> None:
    """The replacement: takes the state from the sources that it is told, again and again."""
    from restore import build
    from torchrelay.protocol.messages.ids import Generation, Point, Rank
    from torchrelay.protocol.messages.orders import Source
    from torchrelay.worker.transfer.transfer import fetch_state

    asked = json.loads(sys.stdin.readline())
    state = build(asked["gigabytes"], trained=False)
    secret = bytes.fromhex(asked["secret"])
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        sources = [Source(Rank(rank), address) for rank, address in json.loads(line)]
        got = fetch_state(sources, secret, Generation(GENERATION), Point(STEP), state, timeout_s=120)
        shares = {str(rank): share for rank, share in got.shares.items()}
        told = {"took_s": got.took_s, "size": got.size, "digest": got.digest, "shares": shares}
        print(json.dumps(told), flush=True)


# ---------------------------------------------------------------- the driver


def limit(isolation: Isolation, node: NodeId, gbit: float | None) -> None:
    """Let no more leave this node's link; None: as much as it can."""
    device = ["tc", "-n", isolation.network.link(node).namespace, "qdisc"]
    if gbit is None:
        subprocess.run([*device, "del", "dev", "eth0", "root"], check=True)
    else:
        bucket = ["tbf", "rate", f"{gbit:g}gbit", "burst", "1mb", "latency", "20ms"]
        subprocess.run([*device, "add", "dev", "eth0", "root", *bucket], check=True)


def in_turns(replacement: Peer, sources: list[tuple[int, str]], rounds: int, name: str) -> tuple[list[Any], list[Any]]:
    """From three and from one, in turns; the first round is a warm-up and left out."""
    three: list[Any] = []
    one: list[Any] = []
    for number in range(rounds + 1):
        # Who is first changes, and so does who is alone, so that drift and differences between them favour nobody.
        turned = sources[number % SOURCES :] + sources[: number % SOURCES]
        for found, asked in ((three, turned), (one, turned[:1]))[:: 1 if number % 2 else -1]:
            found.append(replacement.ask(asked))
        progress(f"{name}, round {number}: three {three[-1]['took_s']:.2f} s, one {one[-1]['took_s']:.2f} s")
    if len({got["digest"] for got in three + one}) != 1:
        raise RuntimeError("the digests of the state differ")
    return three[1:], one[1:]


def measure(work: Path, gigabytes: float, gbit: float, rounds: int) -> dict[str, object]:
    nodes = [NodeId(f"node-{number}") for number in range(SOURCES + 1)]
    secret = os.urandom(32).hex()
    asked = {"gigabytes": gigabytes, "secret": secret}
    with ExitStack() as stack:
        isolation = Isolation.open(work, nodes)
        stack.callback(isolation.close)
        peers = []
        for node in nodes[:SOURCES]:
            words = ["--serve", isolation.network.link(node).address]
            peers.append(Peer(isolation, node, words, work / f"{node}.log"))
            stack.callback(peers[-1].end)
        replacement = Peer(isolation, nodes[-1], ["--take"], work / "replacement.log")
        stack.callback(replacement.end)
        sources = [(number, peer.ask(asked)) for number, peer in enumerate(peers)]
        replacement.ask(asked)
        for node in nodes[:SOURCES]:
            limit(isolation, node, gbit)
        limited = in_turns(replacement, sources, rounds, f"{gbit:g} Gbit/s")
        for node in nodes[:SOURCES]:
            limit(isolation, node, None)
        free = in_turns(replacement, sources, rounds, "unlimited")
    return figures_of(*limited) | {f"{name}_unlimited": value for name, value in figures_of(*free).items()}


def figures_of(three: list[Any], one: list[Any]) -> dict[str, object]:
    three_s, one_s = (statistics.median(got["took_s"] for got in found) for found in (three, one))
    shares = [[got["shares"].get(str(rank), 0) for rank in range(SOURCES)] for got in three]
    parts = [share / sum(each) for each in shares for share in each]
    return {
        "restore_three_s": three_s,
        "restore_one_s": one_s,
        "restore_speedup": one_s / three_s,
        "largest_share": max(parts),
        "smallest_share": min(parts),
        "median_shares": [statistics.median(each[rank] / sum(each) for each in shares) for rank in range(SOURCES)],
        "link_gbit_per_s": 8 * one[0]["size"] / one_s / 1e9,
        "restore_gb": one[0]["size"] / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--gbit", type=float, default=2.0, help="of each source's link")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--short", action="store_true", help="a quarter of a GB, two rounds")
    parser.add_argument("--serve", metavar="HOST", help=argparse.SUPPRESS)
    parser.add_argument("--take", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve)
    if options.take:
        return take()
    why = obstacle() or ("" if shutil.which("tc") else "`tc` is not here: install iproute2")
    if why:
        sys.exit(why)
    gigabytes, rounds = (0.25, 2) if options.short else (options.gigabytes, options.rounds)
    work = Path(tempfile.mkdtemp(prefix="torchrelay-bench-"))
    try:
        finish("slices", measure(work, gigabytes, options.gbit, rounds), gbit=options.gbit, rounds=rounds)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
