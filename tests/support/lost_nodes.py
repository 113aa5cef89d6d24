"""What tests of lost nodes share."""

from __future__ import annotations

import random
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.jobs import SCRIPTS, Finished, differences, end_job, start_job, wait_until
from tests.support.twins import undisturbed
from torchrelay.chaos.deeds import plan_deed
from torchrelay.chaos.whereabouts import Whereabouts
from torchrelay.chaos.wishes import Facts, Wish, draw
from torchrelay.client.client import Away, Client, Denied
from torchrelay.protocol.messages.ids import NodeId, Rank
from torchrelay.schedulers import network as net

STEPS = 140  # at this pace longer than any partition or cut here
PACE_S = 0.1
FLAGS = ["--nodes", "2", "--nproc-per-node", "2", "--spare-nodes", "1"]
isolated = pytest.mark.skipif(bool(net.obstacle()), reason=net.obstacle())


def script(pace_s: float) -> list[str]:
    return [str(SCRIPTS / "faulty.py"), "--steps", str(STEPS), "--pace", str(pace_s)]


@pytest.fixture
def calm() -> Finished:
    """The same training, undisturbed."""
    return undisturbed(script(0.0))


@dataclass
class Training:
    """A job that trains, and what is done to it."""

    run_dir: Path
    process: subprocess.Popen[str]
    chance: random.Random = field(default_factory=lambda: random.Random(1))

    @classmethod
    def begin(cls, folder: Path, *flags: str, pace_s: float = PACE_S) -> Training:
        made = cls(folder / "run", start_job(folder / "run", script(pace_s), [*FLAGS, *flags]))
        wait_until("ten steps, or its end", lambda: made.over() or made.step() >= 10, deadline_s=60)
        assert not made.over(), (folder / "run.out").read_text()[-3000:]
        wait_until("warm spares", lambda: len(made.facts().warm()) == 2, deadline_s=60)
        return made

    @property
    def client(self) -> Client:
        return Client.of(self.run_dir)

    def step(self) -> int:
        """The newest committed anywhere; -1 before the first, or while nobody answers."""
        try:
            step = self.client.job().step
        except (Away, Denied):
            return -1
        return -1 if step is None else step

    def facts(self) -> Facts:
        return Facts(self.client.job(), self.client.view_ranks())

    def node_of(self, rank: int) -> NodeId:
        node = self.facts().holder(Rank(rank)).node
        assert node is not None
        return node

    def pids_on(self, node: NodeId) -> list[int]:
        return [row.pid for row in self.facts().on(node) if row.pid is not None]

    def strike(self, wish: Wish) -> None:
        facts = self.facts()
        plan = plan_deed(draw(wish, facts, self.chance), facts, Whereabouts.of(self.run_dir))
        try:
            plan.act()
            if plan.lasts_s is not None:
                time.sleep(plan.lasts_s)
        finally:
            if plan.lasts_s is not None:
                plan.undo()

    def lost(self, node: NodeId) -> bool:
        return any(one.node == node and not one.alive for one in self.client.view_status().nodes)

    def all_heard(self) -> bool:
        return all(one.alive and (one.silent_ms or 0) < 1_000 for one in self.client.view_status().nodes)

    def over(self) -> bool:
        return self.process.poll() is not None

    def end(self) -> Finished:
        return end_job(self.process, self.run_dir, timeout_s=120)


def verdict(done: Finished, calm: Finished) -> list[str]:
    """What is wrong with a disturbed run."""
    wrong = [] if done.code == 0 else [f"exit code {done.code}: {done.output[-1500:]}"]
    wrong += differences(done, calm)[:10]
    return wrong + [f"{row['id']}: {row['resolution']}" for row in done.incidents() if row["resolution"] != "clean"]
