"""Plan: a run of `torchrelay run` that can be started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torchrelay.launcher.machines import Machines
from torchrelay.launcher.parking import ParkPlace
from torchrelay.protocol.messages.events import JobSpec
from torchrelay.wire.files.launch import Launch

ENDING = frozenset({"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"})  # as torchrun has it
TELLING = frozenset({"SIGUSR1", "SIGUSR2"})  # passed on, and training goes on


@dataclass(frozen=True, slots=True)
class Plan:
    """A run that can be started."""

    run_dir: Path
    spec: JobSpec
    launch: Launch
    port: int
    quiet: bool
    remarks: tuple[str, ...]
    isolate: bool = False
    spare_nodes: int = 0
    links: int = 0
    grace_s: float = 30.0
    ending: frozenset[str] = ENDING  # signals that end the ranks
    machines: Machines | None = None  # nodes that are machines of their own
    export: str = ""  # further variables of the operator's environment that go to them
    join_timeout_s: float = 0.0  # how long nodes may take to join, before the run is given up; 0: for ever
    plain_transfer: bool = False  # the network between them is trusted: what goes from worker to worker is readable
    parking: ParkPlace | None = None  # where the job may be written down
