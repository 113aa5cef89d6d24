"""Running whole jobs as a user does, and comparing what they computed, point by point and rank by rank."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.patience import longer
from torchrelay.client.client import Away, Client, Denied
from torchrelay.client.ledger_file import jsonl, ledger
from torchrelay.client.runs import NotPossible, find_source

SCRIPTS = Path(__file__).parents[1] / "scripts"


@dataclass(frozen=True)
class Finished:
    """A job that has ended: its exit code, what it printed, and where its files are."""

    code: int
    output: str
    run_dir: Path
    digests: dict[tuple[int, str], set[str]] = field(default_factory=dict)

    def incidents(self) -> list[dict[str, Any]]:
        """The ledger's lines, from the journal, after the end."""
        try:
            source, _ = find_source(self.run_dir)
        except NotPossible:
            return []  # there is no journal any more
        return [json.loads(line) for line in jsonl(ledger(source.view_incidents(None))).splitlines()]


def torchrelay(*words: str, timeout_s: float = 60, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a verb of the command line."""
    command = [sys.executable, "-m", "torchrelay.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=longer(timeout_s), cwd=cwd)


_turn = itertools.count()


def start_job(
    run_dir: Path, script: Sequence[str], flags: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start `torchrelay run`; its output goes to run_dir/../<name>.out."""
    digests = run_dir.parent / f"{run_dir.name}-digests"
    digests.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "torchrelay.cli.main", "run", "--run-dir", str(run_dir), *flags, *script]
    # In every other job states are sent, as they are between machines; in the others they are read where they lie.
    ours = {"TORCHRELAY_DIGESTS": str(digests), "OMP_NUM_THREADS": "1", "TORCHRELAY_NEIGHBOURS": str(next(_turn) % 2)}
    environment = {**os.environ, **ours, **(env or {})}
    with (run_dir.parent / f"{run_dir.name}.out").open("w") as out:
        return subprocess.Popen(words, env=environment, stdout=out, stderr=subprocess.STDOUT, text=True)


def end_job(process: subprocess.Popen[str], run_dir: Path, *, timeout_s: float) -> Finished:
    """Wait for its end. One that does not end is killed, and the test fails with what it printed."""
    out = run_dir.parent / f"{run_dir.name}.out"
    try:
        code = process.wait(longer(timeout_s))
    except subprocess.TimeoutExpired:
        status = torchrelay("status", "--run-dir", str(run_dir)).stdout
        process.terminate()
        process.wait(30)
        raise AssertionError(f"no end within {timeout_s} s\n{status}\n{out.read_text()[-6000:]}") from None
    return Finished(code, out.read_text(), run_dir, read_digests(run_dir.parent / f"{run_dir.name}-digests"))


def run_job(
    run_dir: Path,
    script: Sequence[str],
    flags: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    *,
    timeout_s: float = 240,
) -> Finished:
    """Run a job to its end."""
    return end_job(start_job(run_dir, script, flags, env), run_dir, timeout_s=timeout_s)


def read_digests(folder: Path) -> dict[tuple[int, str], set[str]]:
    """(rank, point) -> the digests written there; more than one line where a step was done again."""
    found: dict[tuple[int, str], set[str]] = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        rank = int(path.stem.split("-")[1])
        for line in path.read_text().splitlines():
            if line.endswith("}"):
                row = json.loads(line)
                found.setdefault((rank, row["point"]), set()).add(row["digest"])
    return found


def differences(disturbed: Finished, undisturbed: Finished) -> list[str]:
    """Where two runs differ; empty if they are bit-equal at every point on every rank."""
    told = []
    for key, digests in sorted(undisturbed.digests.items()):
        if len(digests) != 1:
            told.append(f"the undisturbed run is not repeatable at {key}")
        if key not in disturbed.digests:
            told.append(f"rank {key[0]} never stood at {key[1]}")
        elif disturbed.digests[key] != digests:
            told.append(f"rank {key[0]} differs at {key[1]}")
    for key in sorted(disturbed.digests.keys() - undisturbed.digests.keys()):
        told.append(f"rank {key[0]} stood at {key[1]}, which the undisturbed run never did")
    return told


def wait_until(what: str, fact: Any, *, deadline_s: float) -> Any:
    """Wait for a fact (a function that returns something true); fails with its name."""
    until = time.monotonic() + longer(deadline_s)
    while True:
        value = fact()
        if value:
            return value
        assert time.monotonic() < until, f"{what}: not within {deadline_s} s"
        time.sleep(0.02)


def ask_until(
    process: subprocess.Popen[str], run_dir: Path, what: str, fact: Callable[[Client], Any], *, deadline_s: float
) -> Any:
    """Wait for a fact that the run's API tells; fails with its name, or with what the run printed if it has ended."""

    def holds() -> Any:
        assert process.poll() is None, (run_dir.parent / f"{run_dir.name}.out").read_text()[-3000:]
        try:
            return fact(Client.of(run_dir))
        except (Away, Denied, LookupError):
            return None  # it is being started, or has no such thing yet

    return wait_until(what, holds, deadline_s=deadline_s)
