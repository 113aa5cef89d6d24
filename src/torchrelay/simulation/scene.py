"""Scene: the whole world, for who strikes it (`faults`) and who judges it (`invariants`, `checks`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torchrelay.protocol.messages.ids import NodeId, WorkerId
from torchrelay.protocol.model.job import Job, JobPhase
from torchrelay.simulation.machine.court import Court
from torchrelay.simulation.machine.machines import Machine
from torchrelay.simulation.machine.shell import Shell
from torchrelay.simulation.model.script import RankState
from torchrelay.simulation.ports import Reigns, Timeline
from torchrelay.simulation.worker.processes import Process


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
    def whole(self) -> bool: ...
    @property
    def court(self) -> Court | None: ...
    @property
    def reigns(self) -> Reigns: ...
    @property
    def job(self) -> Job | None: ...
    @property
    def phase(self) -> JobPhase | None: ...
    @property
    def over(self) -> bool: ...
    def left_running(self) -> list[Process]: ...
    def at(self, address: str) -> Process | None: ...
