"""Netpath: messages of 1 MiB over two paths of 1 Gb/s, all that can happen to one of them, and what others do then.

    make bench NAME=netpath ARGS="--short"
    make bench NAME=netpath ARGS="--only blackhole --only unshaped"

Two machines are network namespaces, joined by veth paths that a token bucket holds at 1 Gb/s (tests/support/wires.py).
No root is needed. Every byte is checked.
The rivals meet the same faults in the same run: torch's Gloo over plain TCP on path 1, and MPTCP
over both paths; `mptcp_patient` is MPTCP with tcp_rto_max_ms=1000 and tcp_retries2=255. Each trial is a new world, a
stream that was undisturbed for 1.5 s, a fault for 3 s (--hold), and then the time until the rate is what it was.

fault_free_gbps       1 MiB messages, two paths, median; TCP can carry 1.913. Also of one path, and of the rivals
unshaped_gbps         one path without a limit; unshaped_over_iperf3, unshaped_over_plain: the same over iperf3 with one
                      stream, and over stream.c on one TCP connection
link_down_stall_ms    the longest time without a message when a link goes down, the worst of all trials; each machine's
                      link, on a path where both see it and behind a switch where only one does
blackhole_stall_ms    the same if packets are lost without a word, both ways or one way
heal_s                from the end of an outage of 5, 30 or 120 s until the rate before is held for half a second, worst
both_down_resume_s    both paths down: from the moment when one is back until the next message, worst
NAME_stall_ms, NAME_share    of each fault, the worst: the stall (10: none longer), and the rate meanwhile as a share
                      of what the paths that are left can carry
wrong_bytes, errors   of ours, over all trials; both should be 0. Of rivals an error is also a rate that did not come
                      back in time, and changed bytes are not noticed
missed                what is not as it should be, in words; trials: all of them, the rivals' too
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from figures import finish, progress

sys.path.append(str(Path(__file__).parent.parent))  # the world and its faults are the tests', too

from path_trials import OURS, Bench, Outcome, iperf3, middle
from tests.support.path_faults import FAULTS, LINKS, STOPS
from tests.support.streams import build
from tests.support.wires import obstacle

LINK_DOWN = tuple(LINKS)
BLACKHOLE = ("blackhole_both", "blackhole_to_receiver", "blackhole_to_sender")
RIVALS = ("gloo", "mptcp")
HEALS_S = (5.0, 30.0, 120.0)
HEALED_BY = ("link_down_local", "blackhole_both")
STORM_MS = 900.0  # two flaps in a row, on one path and then on the other, before the first is back
# What is asked of ours: the figure must be at most, or at least, this.
AT_MOST = {
    "link_down_stall_ms": 100.0, "blackhole_stall_ms": 300.0, "heal_s": 0.5, "both_down_resume_s": 0.2,
    "storm_stall_ms": STORM_MS, "stopped_resume_s": 0.2, "stopped_downs": 0, "wrong_bytes": 0, "errors": 0,
}  # fmt: skip
SHOWN = ("before_gbps", "stall_ms", "share", "resumed_s", "full_s", "wrong_bytes", "error")
Trial = Callable[[str, str], Outcome]  # of a name and a kind of stream
AT_LEAST = {"fault_free_gbps": 1.90, "unshaped_over_iperf3": 0.9}


class Trials:
    """What was asked for, and what came of it."""

    def __init__(self, bench: Bench, options: argparse.Namespace) -> None:
        self.bench, self.options = bench, options
        self.outcomes: list[Outcome] = []
        self.figures: dict[str, object] = {}

    def wants(self, name: str) -> bool:
        return not self.options.only or any(name.startswith(one) for one in self.options.only)

    def note(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        said = asdict(outcome)
        words = [f"{key} {said[key]}" for key in SHOWN if said[key] not in (None, "")]
        progress(f"{outcome.trial} ({outcome.kind}): {', '.join(words)}")

    def repeated(self, name: str, trial: Trial, rivals: Iterable[str] = (), *, times: int | None = None) -> None:
        """Ours some times, and each rival once."""
        if not self.wants(name):
            return
        for _ in range(times or self.options.repeats):
            self.note(trial(name, OURS))
        for kind in rivals:
            if kind.partition("_")[0] in self.options.rivals:
                self.note(trial(name, kind))

    def of(self, *names: str, kind: str = OURS) -> Iterator[Outcome]:
        return (one for one in self.outcomes if one.kind == kind and one.trial in names)

    def worst(self, figure: str, take: Callable[[Outcome], float | None], *names: str, kind: str = OURS) -> None:
        """Set a figure to the largest of these; what was not reached counts as nothing, and is an error anyway."""
        values = [value for one in self.of(*names, kind=kind) if (value := take(one)) is not None]
        if values:
            self.figures[figure] = max(values)


# ---------------------------------------------------------------- what is tried


def try_undisturbed(trials: Trials) -> None:
    bench, seconds = trials.bench, 1.5 if trials.options.short else 5.0
    trials.repeated("fault_free", partial(bench.undisturbed, seconds=seconds), ("plain", *RIVALS))
    trials.repeated("one_path", partial(bench.undisturbed, seconds=seconds, paths=(1,)))
    trials.repeated("small", partial(bench.undisturbed, seconds=seconds, flags=("--size", "8")), ("plain",))
    if not trials.wants("unshaped"):
        return
    fast = partial(bench.undisturbed, seconds=seconds, rate=None)
    unchecked = partial(fast, flags=("--unchecked",))
    rates = []
    for _ in range(trials.options.repeats):  # in turns, so that what else the machine does meets all of them
        trials.note(unchecked("unshaped", OURS, paths=(1,)))
        trials.note(unchecked("unshaped_two_paths", OURS))
        trials.note(unchecked("unshaped_plain", "plain"))
        rates.append(iperf3(round(seconds + 1)))
        progress(f"unshaped (iperf3): {rates[-1]} Gb/s")
    trials.note(fast("unshaped_checked", OURS, paths=(1,)))
    trials.figures["unshaped_iperf3_gbps"] = middle(rates)


def try_faults(trials: Trials) -> None:
    for name, fault in FAULTS.items():
        rivals = RIVALS if not trials.options.short or name in HEALED_BY else ()
        trials.repeated(name, partial(trials.bench.fault, fault=fault, hold_s=trials.options.hold), rivals)


def try_heals(trials: Trials) -> None:
    for outage_s in HEALS_S[:1] if trials.options.short else HEALS_S:
        rivals = {5.0: RIVALS, 30.0: (*RIVALS, "mptcp_patient")}.get(outage_s, ())
        for how in HEALED_BY:
            trials.repeated(
                f"heal_{outage_s:g}s_{how}",
                partial(trials.bench.fault, fault=FAULTS[how], hold_s=outage_s, limit_s=3 * outage_s + 30),
                () if trials.options.short else rivals,
                times=1 if outage_s > 10 else None,
            )


def try_both(trials: Trials) -> None:
    short = trials.options.short
    for how in ("links", "silence"):
        for down_s in (2.0,) if short else (2.0, 10.0):
            trial = partial(trials.bench.both_down, how=how, down_s=down_s)
            trials.repeated(f"both_down_{how}_{down_s:g}s", trial, () if short else RIVALS)
    for seed in range(1 if short else 4):
        rivals = RIVALS if seed == 0 and not short else ()
        trials.repeated("storm", partial(trials.bench.storm, seed=seed, flaps=12), rivals, times=1)


# ---------------------------------------------------------------- what it comes to


def sum_up_rates(trials: Trials) -> None:
    names = {one.trial for one in trials.outcomes}
    for name in ("fault_free", "one_path", "unshaped", "unshaped_two_paths", "unshaped_checked", "unshaped_plain"):
        for kind in (OURS, "plain", *RIVALS):
            if name in names and (rates := [one.before_gbps for one in trials.of(name, kind=kind) if not one.error]):
                same = kind == OURS or name == "unshaped_plain"
                trials.figures[f"{name}_gbps" if same else f"{kind}_{name}_gbps"] = middle(rates)
    ours = trials.figures.get("unshaped_gbps")
    for rival, figure in (
        ("unshaped_iperf3_gbps", "unshaped_over_iperf3"),
        ("unshaped_plain_gbps", "unshaped_over_plain"),
    ):
        other = trials.figures.get(rival)
        if isinstance(ours, float) and isinstance(other, float) and other:
            trials.figures[figure] = round(ours / other, 3)
    for kind in (OURS, "plain"):
        if small := [one.more["message_us"] for one in trials.of("small", kind=kind) if one.more]:
            trials.figures["small_message_us" if kind == OURS else f"{kind}_small_message_us"] = middle(small)


def sum_up_faults(trials: Trials) -> None:
    heals = sorted({one.trial for one in trials.outcomes if one.trial.startswith("heal_")})
    both = sorted({one.trial for one in trials.outcomes if one.trial.startswith("both_down")})
    for kind in (OURS, *RIVALS, "mptcp_patient"):
        front = "" if kind == OURS else f"{kind}_"
        trials.worst(f"{front}link_down_stall_ms", lambda one: one.stall_ms, *LINK_DOWN, kind=kind)
        trials.worst(f"{front}blackhole_stall_ms", lambda one: one.stall_ms, *BLACKHOLE, kind=kind)
        trials.worst(f"{front}heal_s", lambda one: one.full_s, *heals, kind=kind)
        trials.worst(f"{front}both_down_resume_s", lambda one: one.resumed_s, *both, kind=kind)
        for name in heals:
            trials.worst(f"{front}{name}_s", lambda one: one.full_s, name, kind=kind)
        trials.worst(f"{front}storm_stall_ms", lambda one: one.stall_ms, "storm", kind=kind)
    for name in FAULTS:
        trials.worst(f"{name}_stall_ms", lambda one: one.stall_ms, name)
    for name, fault in FAULTS.items():
        if fault.rate and (shares := [one.share for one in trials.of(name) if one.share is not None]):
            trials.figures[f"{name}_share"] = min(shares)
    trials.worst("stopped_resume_s", lambda one: one.resumed_s, *STOPS)
    trials.worst("stopped_downs", lambda one: float(one.more.get("downs", 0)), *STOPS)
    for kind in ("mptcp", "gloo", OURS):
        of_kind = [one for one in trials.outcomes if one.kind == kind]
        front = "" if kind == OURS else f"{kind}_"
        if of_kind:
            trials.figures[f"{front}wrong_bytes"] = sum(one.wrong_bytes for one in of_kind)
            trials.figures[f"{front}errors"] = sum(bool(one.error) for one in of_kind)


def missed(figures: dict[str, object]) -> list[str]:
    """What is not as it should be, in words."""
    bounds = [(name, most, "at most") for name, most in AT_MOST.items()]
    bounds += [(name, least, "at least") for name, least in AT_LEAST.items()]
    for name, fault in FAULTS.items():
        bounds += [(f"{name}_stall_ms", fault.stall_ms, "at most")] if fault.stall_ms is not None else []
        bounds += [(f"{name}_share", fault.rate, "at least")] if fault.rate is not None else []
    found = []
    for name, bound, how in bounds:
        value = figures.get(name)
        if isinstance(value, int | float) and (value > bound if how == "at most" else value < bound):
            found.append(f"{name} is {value:g}, and should be {how} {bound:g}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="each once, short outages, few rivals: two minutes")
    parser.add_argument("--only", action="append", default=[], help="trials whose names begin so; may be repeated")
    parser.add_argument("--repeats", type=int, help="of each trial of ours that takes seconds (3; with --short 1)")
    parser.add_argument("--hold", type=float, help="seconds that a fault lasts (3; with --short 1)")
    parser.add_argument("--rivals", default=",".join(RIVALS), help="of plain, gloo, mptcp; '' for none")
    options = parser.parse_args()
    options.repeats = options.repeats or (1 if options.short else 3)
    options.hold = options.hold or (1.0 if options.short else 3.0)
    options.rivals = {"plain", *options.rivals.split(",")} if options.rivals else set()
    if obstacle():
        raise SystemExit(f"no bench: {obstacle()}")
    with tempfile.TemporaryDirectory(prefix="torchrelay-netpath-") as folder:
        trials = Trials(Bench(build(Path(folder)), Path(folder)), options)
        for part in (try_undisturbed, try_faults, try_heals, try_both):
            part(trials)
    sum_up_rates(trials)
    sum_up_faults(trials)
    algorithm = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    finish(
        "netpath",
        trials.figures,
        missed=missed(trials.figures),
        congestion=algorithm,
        trials=[asdict(one) for one in trials.outcomes],
    )
    sys.exit(1 if trials.figures.get("wrong_bytes") or trials.figures.get("errors") else 0)


if __name__ == "__main__":
    main()
