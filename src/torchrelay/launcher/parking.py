"""Parking: what `torchrelay run` has to do with it: a note of who goes on, a SIGTERM that parks, and how to go on."""

from __future__ import annotations

import os
import shlex
import socket
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from torchrelay.client.runs import NotPossible
from torchrelay.wire.parked.manifest import RESUMED, Gone, Manifest, read_gone, write_gone

CANNOT_START = 94
PARKING = "SIGTERM"  # the signal that parks, where there is a place for it: schedulers send it


@dataclass(slots=True)
class ParkPlace:
    """Where a run may park, and from where it goes on."""

    folder: Path
    key: str  # of its parkings
    resume: Path | None = None
    manifest: Manifest | None = None
    former: Gone | None = None  # which run had gone on from there before

    def claim(self, run_dir: Path) -> None:
        """Before anything starts: from now on this parking is taken. Raises `NotPossible`."""
        if self.resume is None or self.manifest is None:
            return
        gone = Gone(
            name=self.manifest.name,
            run=str(run_dir.absolute()),
            who=f"process {os.getpid()} on {socket.gethostname()}",
            at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        try:
            self.former = read_gone(self.resume, self.manifest)
            write_gone(self.resume, gone)
        except OSError as error:
            raise NotPossible(f"{self.resume / RESUMED}: {error.strerror}", CANNOT_START) from error

    def give_back(self) -> None:
        """This run has not gone on from there: the next one may."""
        if self.resume is None:
            return
        with suppress(OSError):
            if self.former is not None:
                write_gone(self.resume, self.former)
            else:
                (self.resume / RESUMED).unlink(missing_ok=True)

    def is_behind(self, step: int | None) -> bool:
        """Whether a job that is so far has gone on from there."""
        return self.manifest is not None and step is not None and step > self.manifest.point.step

    @property
    def told(self) -> str:
        """What is said at the start; empty if it begins anew."""
        if self.manifest is None:
            return ""
        return f"goes on after {self.manifest.point}, parked {self.manifest.at}: {self.manifest.reason}"

    def how_to_go_on(self) -> str:
        """What is said at the end of a job that has parked."""
        return f"to go on: torchrelay run --resume {shlex.quote(str(self.folder))}, and the flags and script as before"
