"""Training over several network paths, and what is done to them: the GPT example, four ranks on two pretended nodes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.jobs import Finished, ask_until, end_job, start_job
from torchrelay.client.client import Client
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.schedulers import network as net
from torchrelay.schedulers.local import read_file

SCRIPT = Path(__file__).parents[2] / "examples" / "train_gpt.py"
PLAIN = ("--nodes", "2", "--nproc-per-node", "2")
LINKS = ("--isolate", "--links", "2")
FAILOVER = (*LINKS, "--net-failover")
A, B = NodeId("node-0"), NodeId("node-1")


class Training:
    """A job that trains over paths, and what is done to them."""

    def __init__(
        self, folder: Path, steps: int, flags: Sequence[str] = FAILOVER, env: Mapping[str, str] | None = None
    ) -> None:
        self.run_dir, self.losses, self.steps = folder / "run", folder / "losses", steps
        self.process: subprocess.Popen[str] = start_job(
            self.run_dir, training(self.losses, steps), [*PLAIN, *flags], env
        )

    @property
    def network(self) -> net.Network:
        found = read_file(self.run_dir / net.RECORD, net.Network)
        assert found is not None
        return found

    def until(self, what: str, fact: Callable[[Client], Any], deadline_s: float = 90) -> Any:
        return ask_until(self.process, self.run_dir, what, fact, deadline_s=deadline_s)

    def step(self) -> int:
        """Steps that rank 0 has written down."""
        path = self.losses / "rank-0.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def await_steps(self, more: int) -> None:
        wanted = self.step() + more
        assert wanted < self.steps, "the job is too short for what is done to it"
        self.until(f"step {wanted}", lambda _: self.step() >= wanted)

    def state(self, node: NodeId, path: int) -> set[str]:
        """The states of a path of a node, to all of its peers on other nodes."""
        own = self.network.link(node).path(path)
        news = [one.news for one in Client.of(self.run_dir).view_network().nodes if one.node == node]
        return {
            link.state
            for one in news
            for each in one.paths
            if each.interface == own.name
            for link in each.links
            if link.remote != own.address
        }

    def await_state(self, node: NodeId, path: int, wanted: set[str]) -> None:
        self.until(f"path {path} of {node} is {wanted}", lambda _: self.state(node, path) == wanted)

    def end(self) -> Finished:
        done = end_job(self.process, self.run_dir, timeout_s=240)
        assert done.code == 0, done.output[-3000:]
        return done


def training(losses: Path, steps: int) -> list[str]:
    words = ["--params", "tiny", "--epochs", "1", "--epoch-steps", str(steps), "--batch", "2", "--warmup", "4"]
    return [str(SCRIPT), *words, "--losses", str(losses)]
