"""Scene: the whole world, for who strikes it (`faults`) and who judges it (`invariants`, `dating`, `proofs`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torchrelay.protocol.ids import NodeId, WorkerId
from torchrelay.protocol.job import Job, JobPhase
from torchrelay.simulation.machines import Machine
from torchrelay.simulation.ports import Timeline
from torchrelay.simulation.processes import Process
from torchrelay.simulation.script import RankState
from torchrelay.simulation.shell import Shell


class Scene(Timeline, Protocol):
    """Its processes (the ended ones too), its machines, its orchestrator, and the job."""

    checkpoint: tuple[int, tuple[RankState, ...]]

    @property
    def processes(self) -> Mapping[WorkerId, Process]: ...
    @property
    def machines(self) -> Mapping[NodeId, Machine]: ...
    @property
    def shell(self) -> Shell: ...
    @property
    def job(self) -> Job | None: ...
    @property
    def phase(self) -> JobPhase | None: ...
    @property
    def over(self) -> bool: ...
    def at(self, address: str) -> Process | None: ...
