"""Whole nodes on real processes: an agent alone, a whole node at once, a partition, a power cut; 4 ranks, 3 nodes of 2.

What a fault must come to: the same bits as without it, on every rank at every point, every incident clean.
"""

from __future__ import annotations

import random
import re
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.jobs import SCRIPTS, Finished, differences, end_job, start_job, wait_until
from tests.processes import exists
from tests.twins import undisturbed
from torchrelay.chaos.deeds import plan_deed
from torchrelay.chaos.whereabouts import Whereabouts
from torchrelay.chaos.wishes import Deed, Facts, How, Wish, draw
from torchrelay.client.client import Away, Client, Denied
from torchrelay.protocol.health.silence import LEAST_SILENCE_MS, MOST_SILENCE_MS
from torchrelay.protocol.messages.ids import NodeId, Rank
from torchrelay.schedulers import network as net
from torchrelay.schedulers.port import SchedulerError
from torchrelay.wire.messages.prompt import resume_soon

pytestmark = [pytest.mark.slow, pytest.mark.jobs, pytest.mark.timeout(240)]

STEPS = 140  # at this pace longer than any partition or cut here
PACE_S = 0.1
FLAGS = ["--nodes", "2", "--nproc-per-node", "2", "--spare-nodes", "1"]
isolated = pytest.mark.skipif(bool(net.obstacle()), reason=net.obstacle())
with socket.socket() as probe:
    PROMPT = resume_soon(probe)
# What may pass between the limit and the verdict: a commit of which another node told later, a tick that was late.
MARGIN_S = 5.0


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


@pytest.mark.soak
def test_an_agent_that_is_killed_adopts_its_workers_and_nothing_stops(tmp_path: Path, calm: Finished) -> None:
    training = Training.begin(tmp_path)
    node = training.node_of(2)
    before, agent = training.pids_on(node), Whereabouts.of(training.run_dir).agent(node)
    training.strike(Wish(deed=Deed.AGENT, node=node))
    wait_until("another agent", lambda: Whereabouts.of(training.run_dir).agents()[node] not in (agent, None),
               deadline_s=20)  # fmt: skip
    step = training.step()
    wait_until("ten steps more", lambda: training.step() >= step + 10, deadline_s=60)
    assert training.pids_on(node) == before
    done = training.end()
    assert verdict(done, calm) == []
    assert done.incidents() == []


def test_a_node_whose_processes_all_die_at_once_costs_not_a_bit(tmp_path: Path, calm: Finished) -> None:
    training = Training.begin(tmp_path, pace_s=PACE_S / 2)
    training.strike(Wish(deed=Deed.NODE, node=training.node_of(2)))
    done = training.end()
    assert len(done.incidents()) == 1
    assert verdict(done, calm) == []


@pytest.mark.soak
def test_a_whole_node_of_spares_is_missed_by_nobody(tmp_path: Path, calm: Finished) -> None:
    training = Training.begin(tmp_path)
    held = {training.node_of(rank) for rank in range(4)}
    (spare,) = {row.node for row in training.facts().warm() if row.node is not None} - held
    training.strike(Wish(deed=Deed.NODE, node=spare))
    wait_until("spares again", lambda: len(training.facts().warm()) == 2, deadline_s=60)
    done = training.end()
    assert verdict(done, calm) == []
    assert done.incidents() == []


@pytest.mark.soak
def test_an_agent_that_is_asked_to_be_away_is_missed_by_nobody(tmp_path: Path, calm: Finished) -> None:
    training = Training.begin(tmp_path)
    partition(training, calm)


@isolated
@pytest.mark.soak
def test_a_partition_of_agent_and_orchestrator_interrupts_nothing(tmp_path: Path, calm: Finished) -> None:
    training = Training.begin(tmp_path, "--isolate")
    partition(training, calm)


def partition(training: Training, calm: Finished) -> None:
    """Ten seconds, longer than a node may be silent."""
    step = training.step()
    training.strike(Wish(deed=Deed.PARTITION, node=training.node_of(2), for_s=10.0))
    assert training.step() >= step + 20
    wait_until("all are heard", training.all_heard, deadline_s=30)
    done = training.end()
    assert verdict(done, calm) == []
    assert done.incidents() == []


@isolated
@pytest.mark.skipif(not PROMPT, reason="before Linux 6.15 a connection may be silent for long after its link is back")
@pytest.mark.soak
def test_a_link_that_is_down_for_less_than_the_limit_costs_only_time(tmp_path: Path, calm: Finished) -> None:
    training = Training.begin(tmp_path, "--isolate")
    training.strike(Wish(deed=Deed.NODE, node=training.node_of(2), how=How.POWER, for_s=4.0))
    step = training.step()
    wait_until("training again", lambda: training.step() > step + 5, deadline_s=30)
    done = training.end()
    assert verdict(done, calm) == []
    assert done.incidents() == []


# ---------------------------------------------------------------- a power cut


@dataclass
class PowerCut:
    """What came of one."""

    done: Finished
    detected_s: float
    told: str
    strays: list[int]  # its processes that lived when its link came up again
    left: list[int]  # of these, who lived on


@pytest.fixture(scope="module")
def power(tmp_path_factory: pytest.TempPathFactory) -> PowerCut:
    """The link of a node with two ranks goes down in the middle of training, and up again after the recovery."""
    training = Training.begin(tmp_path_factory.mktemp("power"), "--isolate")
    node = training.node_of(2)
    pids, network = training.pids_on(node), Whereabouts.of(training.run_dir).network
    assert network is not None
    begin = time.monotonic()
    training.strike(Wish(deed=Deed.NODE, node=node, how=How.POWER))
    wait_until("the loss", lambda: training.over() or training.lost(node), deadline_s=90)
    detected_s = time.monotonic() - begin
    try:
        step = training.step()
        wait_until("training again", lambda: training.over() or training.step() > step + 5, deadline_s=60)
        strays = [pid for pid in pids if exists(pid)]
        net.mend(network, node)
        wait_until("the end of strays", lambda: training.over() or not any(map(exists, pids)), deadline_s=40)
        left = [pid for pid in pids if exists(pid)]
    except (SchedulerError, Away):
        strays, left = [], []  # the run is over
    done = training.end()
    told = " ".join(str(row["cause"]) for row in done.incidents())
    print(f"power cut: lost after {detected_s:.2f} s, {told}")
    return PowerCut(done, detected_s, told, strays, left)


@isolated
def test_a_power_cut_is_found_by_silence_within_the_stated_time(power: PowerCut) -> None:
    told = re.search(r"no beat for ([\d.]+) s \(limit ([\d.]+) s\)", power.told)
    assert told is not None, power.told
    silent_s, limit_s = float(told[1]), float(told[2])
    # Where beats came late before, on a busy machine, the limit is longer.
    assert LEAST_SILENCE_MS <= 1000 * limit_s <= MOST_SILENCE_MS
    assert limit_s <= silent_s <= limit_s + MARGIN_S
    assert LEAST_SILENCE_MS / 1000 - 0.5 <= power.detected_s < silent_s + MARGIN_S


@isolated
def test_a_power_cut_costs_not_a_bit(power: PowerCut, calm: Finished) -> None:
    assert len(power.done.incidents()) == 1
    assert verdict(power.done, calm) == []


@isolated
def test_processes_that_come_back_with_the_link_are_fenced(power: PowerCut) -> None:
    assert len(power.strays) >= 2
    assert power.left == []
