"""Whole nodes on real processes: an agent alone, a whole node at once, a partition, a power cut; 4 ranks, 3 nodes of 2.

What a fault must come to: the same bits as without it, on every rank at every point, every incident clean.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.jobs import Finished, wait_until
from tests.support.lost_nodes import (
    PACE_S,
    Training,
    calm,  # noqa: F401  a fixture
    isolated,
    verdict,
)
from tests.support.processes import exists
from torchrelay.chaos.whereabouts import Whereabouts
from torchrelay.chaos.wishes import Deed, How, Wish
from torchrelay.client.client import Away
from torchrelay.protocol.health.silence import LEAST_SILENCE_MS, MOST_SILENCE_MS
from torchrelay.schedulers import network as net
from torchrelay.schedulers.port import SchedulerError

pytestmark = pytest.mark.timeout(240)
# What may pass between the limit and the verdict: a commit of which another node told later, a tick that was late.
MARGIN_S = 5.0


def test_a_node_whose_processes_all_die_at_once_costs_not_a_bit(tmp_path: Path, calm: Finished) -> None:
    training = Training.begin(tmp_path, pace_s=PACE_S / 2)
    training.strike(Wish(deed=Deed.NODE, node=training.node_of(2)))
    done = training.end()
    assert len(done.incidents()) == 1
    assert verdict(done, calm) == []


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
