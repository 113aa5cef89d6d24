"""Paths: steps of DDP training while network paths are lost, over torchrelay's backend with two paths.

    make bench NAME=paths ARGS="--short"

The GPT example on four ranks of two pretended nodes (namespaces; root), each with two links for collectives. Link 1 of
a node goes down for 5 s, or swallows packets for 5 s, or links of either node flap, one after the other. What the same
faults do to Gloo and MPTCP is in the bench `netpath`: there is nothing but to wait until the link is back.

step_ms               the usual step, median; longest_undisturbed_ms: the longest, without faults
cut_longest_ms        the longest step while the link is down, and in the 3 s after; worst of all repeats
blackhole_longest_ms  the same if packets are lost without a word
storm_longest_ms      the same in a storm of flaps
bits_equal            whether all losses and all parameters are those of an undisturbed run, to the last bit
incidents             what the orchestrator had to do for it; should be 0
missed                what is not as it should be, in words
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from figures import finish, progress

sys.path.append(str(Path(__file__).parent.parent))  # the job and its faults are the tests', too

from examples.demo.bits import Trace, compare, read
from tests.support.path_training import FAILOVER, A, B, Training
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.schedulers import network as net

AFTER_S = 3.0
REST_S = 4.0
MOST_MS = 1000.0  # a step may take so long
Window = tuple[str, float, float]  # a fault, when it began, and when its consequences should be over


def outage(lose: Callable[[net.Network, NodeId, int], None], network: net.Network, hold_s: float) -> None:
    lose(network, A, 1)
    time.sleep(hold_s)
    net.mend_path(network, A, 1)


def storm(network: net.Network, chance: random.Random, flaps: int) -> None:
    for _ in range(flaps):
        node, path = chance.choice((A, B)), chance.choice((1, 2))
        net.cut_path(network, node, path)
        time.sleep(chance.uniform(0.1, 0.4))
        net.mend_path(network, node, path)
        time.sleep(chance.uniform(0.1, 0.4))


def strike(job: Training, options: argparse.Namespace, repeats: int) -> list[Window]:
    """All faults, one after the other."""
    found: list[Window] = []
    chance, network = random.Random(options.seed), job.network
    for _ in range(repeats):
        for name in ("cut", "blackhole", "storm"):
            begun = time.time()
            if name == "storm":
                storm(network, chance, options.flaps)
            else:
                outage(net.cut_path if name == "cut" else net.swallow_path, network, options.hold)
            found.append((name, begun, time.time() + AFTER_S))
            progress(f"{name}: step {job.step()} of {job.steps}")
            time.sleep(REST_S)
    return found


def steps_of(trace: Trace) -> list[tuple[float, float]]:
    """When each step of rank 0 ended, and what it took, in seconds."""
    at = [when for (rank, _), when in sorted(trace.at.items()) if rank == 0]
    return [(later, later - earlier) for earlier, later in pairwise(at)]


def longest_ms(steps: list[tuple[float, float]], begun: float, over: float) -> float:
    """The longest step of those that were under way in this time."""
    return round(1000 * max((took for end, took in steps if end >= begun and end - took <= over), default=0.0), 1)


def run(folder: Path, steps: int, disturb: Callable[[Training], list[Window]]) -> tuple[Trace, list[Window], int]:
    """One job to its end: what its ranks wrote down, what was done to it, and how many incidents there were."""
    folder.mkdir()
    job = Training(folder, steps, FAILOVER)
    job.await_steps(20)
    windows = disturb(job)
    if job.process.poll() is not None:
        raise SystemExit(f"the job had ended before the last fault: more --steps than {steps}")
    done = job.end()
    return read(folder / "no digests", folder / "losses"), windows, len(done.incidents())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="each fault once: two minutes")
    parser.add_argument("--repeats", type=int, help="of all faults (3; with --short 1)")
    parser.add_argument("--steps", type=int, help="of the job (1,100 for each repeat, and 400)")
    parser.add_argument("--hold", type=float, default=5.0, help="seconds that a path is lost (5)")
    parser.add_argument("--flaps", type=int, default=12, help="of a storm (12)")
    parser.add_argument("--seed", type=int, default=1, help="of the storms")
    options = parser.parse_args()
    repeats = options.repeats or (1 if options.short else 3)
    steps = options.steps or 1100 * repeats + 400
    if why := net.obstacle():
        raise SystemExit(f"no bench: {why}")
    with tempfile.TemporaryDirectory(prefix="torchrelay-paths-") as name:
        folder = Path(name)
        calm, _, _ = run(folder / "calm", steps, lambda _: [])
        ours, windows, incidents = run(folder / "ours", steps, lambda job: strike(job, options, repeats))
        usual = [took for _, took in steps_of(calm)]
        figures: dict[str, object] = {
            "step_ms": round(1000 * statistics.median(usual), 1),
            "longest_undisturbed_ms": round(1000 * max(usual), 1),
            "steps": steps,
        }
        figures |= worst(ours, windows)
        figures["bits_equal"] = compare(calm, ours).differences == ()
        figures["incidents"] = incidents
    finish("paths", figures, missed=missed(figures))
    sys.exit(0 if figures["bits_equal"] else 1)


def worst(trace: Trace, windows: list[Window]) -> dict[str, object]:
    steps = steps_of(trace)
    found: dict[str, float] = {}
    for name, begun, over in windows:
        figure = f"{name}_longest_ms"
        found[figure] = max(found.get(figure, 0.0), longest_ms(steps, begun, over))
    return dict(found)


def missed(figures: dict[str, object]) -> list[str]:
    """What is not as it should be, in words."""
    found = [] if figures["bits_equal"] else ["bits differ from the undisturbed run"]
    if figures["incidents"]:
        found.append(f"{figures['incidents']} incidents, and there should be none")
    for name in ("cut_longest_ms", "blackhole_longest_ms", "storm_longest_ms"):
        value = figures.get(name)
        if isinstance(value, float) and value > MOST_MS:
            found.append(f"{name} is {value:g}, and should be at most {MOST_MS:g}")
    return found


if __name__ == "__main__":
    main()
