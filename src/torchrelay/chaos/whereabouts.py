"""Whereabouts: where a run's processes are, by its own records. Faults are made on this machine, by their owner."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torchrelay.api.endpoint import read_endpoint
from torchrelay.protocol.messages.ids import NodeId, WorkerId
from torchrelay.schedulers.local import NODES, read_file
from torchrelay.schedulers.machine import RECORD as MACHINE
from torchrelay.schedulers.machine import Machine, boot_id, read_machine
from torchrelay.schedulers.network import RECORD as NETWORK
from torchrelay.schedulers.network import Network
from torchrelay.schedulers.port import ClusterView
from torchrelay.wire.files.procfs import (
    ProcessGone,
    children_of,
    command_line,
    is_alive,
    living_below,
    read_stat,
    started_at,
)

AGENT = "torchrelay.agent"
FORKSERVER = "torchrelay.agent.workers.forkserver"
ORCHESTRATOR = "torchrelay.orchestrator"


class Refusal(ValueError):
    """Nothing was done, and why."""


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """A run on this machine. `network`: of virtual nodes that have links of their own."""

    run_dir: Path
    machine: Machine
    network: Network | None

    @classmethod
    def of(cls, run_dir: Path) -> Whereabouts:
        """Raises `Refusal` for a run that is not ours to break, `SchedulerError` if its records are damaged."""
        machine = read_machine(run_dir)
        if machine is None:
            raise Refusal(f"{run_dir} has no {MACHINE}: faults can be made in runs of `torchrelay run` on this machine")
        if machine.boot != boot_id():
            raise Refusal(f"the run is on {machine.host}, or was before this machine started anew: make faults there")
        if machine.uid != os.getuid():
            raise Refusal(f"the run belongs to user {machine.uid}: only its owner may break it")
        if not lives_since(machine.pid, (run_dir / MACHINE).stat().st_mtime):
            raise Refusal(f"the run in {run_dir} has ended")
        return cls(run_dir, machine, read_file(run_dir / NETWORK, Network))

    def agents(self) -> dict[NodeId, int | None]:
        """The virtual nodes and their agents' processes; None where none runs at the moment."""
        view = read_file(self.run_dir / NODES, ClusterView)
        nodes = view.nodes if view is not None else ()
        return {
            node.node: node.agent_pid if node.agent_pid and runs(node.agent_pid, AGENT, node.node) else None
            for node in nodes
        }

    def agent(self, node: NodeId) -> int:
        """Raises `Refusal` if there is none."""
        agents = self.agents()
        if node not in agents:
            raise Refusal(f"no node {node!r}; there are {', '.join(sorted(agents))}")
        pid = agents[node]
        if pid is None:
            raise Refusal(f"the agent of {node} does not run at the moment")
        return pid

    def check_is_here(self, node: NodeId) -> None:
        """A process of another machine has a number that on this one is somebody else's. Raises `Refusal`."""
        if node not in self.agents():
            raise Refusal(f"{node} is a machine of its own: make the fault there, `kill -9` of a rank's process say")

    def family(self, node: NodeId, workers: Iterable[int]) -> list[int]:
        """The node's forkserver and all below it, the forkserver first. `workers`: those that are known.

        Raises `Refusal`.
        """
        if workers := list(workers):
            self.check_is_here(node)
        agent = self.agents().get(node)
        candidates = [parent_of(pid) for pid in workers] + list(children_of(agent) if agent is not None else ())
        servers = dict.fromkeys(pid for pid in candidates if pid and runs(pid, FORKSERVER))
        found = [pid for server in servers for pid in (server, *(each.pid for each in living_below(server)))]
        return list(dict.fromkeys(found))

    def orchestrator(self) -> int:
        """Raises `Refusal` if it does not run at the moment."""
        endpoint = read_endpoint(self.run_dir)
        if endpoint is None or not runs(endpoint.pid, ORCHESTRATOR):
            raise Refusal("the orchestrator does not run at the moment")
        return endpoint.pid

    def folder(self, node: NodeId) -> Path:
        """The node's sockets and pages."""
        return Path(self.machine.folder) / node

    def page(self, node: NodeId, worker: WorkerId) -> Path:
        return self.folder(node) / f"{worker}.page"


def lives_since(pid: int, noted: float) -> bool:
    """Whether this process was there when its id was noted (seconds since 1970), and is there still."""
    try:
        return started_at(pid) <= noted + 1 and is_alive(pid)
    except ProcessGone:
        return False


def runs(pid: int, *words: str) -> bool:
    """Whether this process runs and all these words stand in its command line."""
    try:
        line = command_line(pid)
    except ProcessGone:
        return False
    return all(word in line for word in words)


def parent_of(pid: int) -> int | None:
    try:
        return read_stat(pid).parent
    except ProcessGone:
        return None
