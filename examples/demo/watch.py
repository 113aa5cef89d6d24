"""Watch: one run from outside, through what any operator has: the command line, the API, and the files it writes."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from torchrelay.chaos.story import Facts
from torchrelay.protocol.model.incident import UNSETTLED

TRAINING = {"computing", "gate", "updating", "between", "section"}
ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class Seen:
    """A job as the API shows it: `/v1/status`, `/v1/jobs/{job}/ranks` and `/v1/jobs/{job}/incidents`."""

    status: dict[str, Any]
    ranks: list[dict[str, Any]]
    incidents: list[dict[str, Any]]

    def facts(self) -> Facts:
        """What a story asks for."""
        holders = [row for row in self.ranks if row["rank"] is not None]
        training = (
            self.status["phase"] == "running"
            and len(holders) == self.status["world_size"]
            and all(row["state"] in TRAINING and row["process"] not in ("T", "Z") for row in holders)
        )
        return Facts(
            step=self.status["step"],
            phase=self.status["phase"],
            training=training,
            spares=self.status["spares"]["warm"],
            pids={row["rank"]: row["pid"] for row in holders if row["pid"]},
            places={row["rank"]: f"{row['node']}/{row['slot']}" for row in holders if row["worker"]},
            moving=self.status.get("move") is not None,
            resolved=sum(one["resolution"] not in UNSETTLED for one in self.incidents),
        )


class Job:
    """`torchrelay run` of one script, and how to look at it."""

    def __init__(self, run_dir: Path, flags: Sequence[str], script: Sequence[str], digests: Path) -> None:
        self.run_dir = run_dir
        self.log = run_dir.with_suffix(".log")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        words = [*torchrelay("run"), "--run-dir", str(run_dir), *flags, *script]
        environment = {**os.environ, "TORCHRELAY_DIGESTS": str(digests)}
        with self.log.open("wb") as log:
            # In a session of its own: Ctrl-C reaches us alone, and we pass it on once.
            self.process = subprocess.Popen(words, env=environment, stdout=log, stderr=log, start_new_session=True)

    def ended(self) -> bool:
        return self.process.poll() is not None

    def look(self) -> Seen | None:
        """The job now; None while there is nobody to ask."""
        try:
            jobs = self.ask("/v1/status")["jobs"]
            if not jobs:
                return None
            name = jobs[0]["job"]
            ranks = self.ask(f"/v1/jobs/{name}/ranks")["ranks"]
            return Seen(jobs[0], ranks, self.ask(f"/v1/jobs/{name}/incidents")["incidents"])
        except (OSError, http.client.HTTPException, ValueError):
            return None  # not there yet, or not any more; the process's end says which

    def ask(self, path: str) -> Any:
        """GET from the API. Raises `OSError` if nobody answers, `ValueError` if the answer is no JSON."""
        endpoint = json.loads((self.run_dir / "endpoint.json").read_text())
        token = (self.run_dir / "token").read_text().strip()
        request = urllib.request.Request(endpoint["url"] + path, headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return msgspec.json.decode(answer.read())

    def ledger(self) -> list[dict[str, Any]]:
        """One line per incident, from `torchrelay report`, also when all is over."""
        words = [*torchrelay("report"), "--run-dir", str(self.run_dir), "-o", "jsonl"]
        told = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
        return [json.loads(line) for line in told.splitlines() if line.startswith("{")]

    def end(self) -> int:
        """Stop it as Ctrl-C does, and the hard way if that does not help; returns its exit code."""
        for signum, patience_s in ((signal.SIGINT, 30.0), (signal.SIGINT, 10.0)):
            if self.process.poll() is None:
                self.process.send_signal(signum)
                try:
                    self.process.wait(patience_s)
                except subprocess.TimeoutExpired:
                    continue
        if self.process.poll() is None:
            self.process.kill()
        return self.process.wait()


def torchrelay(verb: str) -> list[str]:
    """The command line of this environment, found also when it is not on the PATH."""
    return [sys.executable, "-m", "torchrelay.cli.main", verb]


class Tail:
    """The lines of JSON that a file gains, from the beginning on; a last line without its end is left for later."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0

    def read(self) -> list[dict[str, Any]]:
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                whole = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self.offset += len(whole[0]) + len(whole[1])
        return [json.loads(line) for line in whole[0].splitlines()]
