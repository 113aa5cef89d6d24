"""Orders: acts of a story as an operator gives them, by the command line."""

from __future__ import annotations

import subprocess
from pathlib import Path

from examples.demo.watch import torchrelay
from torchrelay.chaos.faults import Fault
from torchrelay.chaos.story import Act, Facts, Strike, node_of

ORDER_S = 60.0
DRAINED = "torchrelay/drain"


class OrderRefused(RuntimeError):
    """The command did not do what it was told to."""


def words_of(act: Strike, facts: Facts, run_dir: Path) -> list[str]:
    """The verb and its words. An undrain is about what is drained now, as the run's own list of nodes tells."""
    place = facts.places[act.of] if act.of is not None else ""
    match act.fault:
        case Act.NODE:
            return ["chaos", "node", "--node", node_of(place), "--how", "kill", "--no-wait"]
        case Act.TAINT:
            ttl = ["--ttl", f"{act.ttl}s"] if act.ttl else []
            return ["taint", place, "ecc=23/h", *ttl, "--reason", "correctable errors"]
        case Act.DRAIN:
            (run_dir / "drained").write_text(node_of(place))
            return ["drain", node_of(place), "--reason", "firmware"]
        case Act.UNDRAIN:
            return ["undrain", (run_dir / "drained").read_text()]
        case Act.ORCHESTRATOR:
            return ["chaos", "orchestrator", "--no-wait"]
        case Fault.KILL:
            return ["chaos", "kill", "--rank", str(act.ranks[0]), "--phase", act.within, "--no-wait"]
        case _:
            raise AssertionError(f"{act.fault} is carried out by process id")


def carry_out(act: Strike, facts: Facts, run_dir: Path) -> str:
    """Give the order; returns the command line for people. Raises `OrderRefused`."""
    words = words_of(act, facts, run_dir)
    done = subprocess.run(
        [*torchrelay(words[0]), *words[1:], "--yes", "--run-dir", str(run_dir)],
        capture_output=True,
        text=True,
        timeout=ORDER_S,
        stdin=subprocess.DEVNULL,
    )
    told = "torchrelay " + " ".join(words)
    if done.returncode != 0:
        raise OrderRefused(f"{told} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return told
