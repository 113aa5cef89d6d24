"""Whole nodes on real processes: an agent alone, a whole node at once, a partition, a power cut; 4 ranks, 3 nodes of 2.

What a fault must come to: the same bits as without it, on every rank at every point, every incident clean.
"""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.support.jobs import Finished, wait_until
from tests.support.lost_nodes import (
    Training,
    calm,  # noqa: F401  a fixture
    isolated,
    verdict,
)
from torchrelay.chaos.whereabouts import Whereabouts
from torchrelay.chaos.wishes import Deed, How, Wish
from torchrelay.wire.messages.prompt import resume_soon

pytestmark = pytest.mark.timeout(240)
with socket.socket() as probe:
    PROMPT = resume_soon(probe)


def test_an_agent_that_is_killed_adopts_its_workers_and_nothing_stops(tmp_path: Path, calm: Finished) -> None:
    training = Training.begin(tmp_path)
    node = training.node_of(2)
    before, agent = training.pids_on(node), Whereabouts.of(training.run_dir).agent(node)
    training.strike(Wish(deed=Deed.AGENT, node=node))
    wait_until(
        "another agent", lambda: Whereabouts.of(training.run_dir).agents()[node] not in (agent, None), deadline_s=20
    )
    step = training.step()
    wait_until("ten steps more", lambda: training.step() >= step + 10, deadline_s=60)
    assert training.pids_on(node) == before
    done = training.end()
    assert verdict(done, calm) == []
    assert done.incidents() == []


def test_a_whole_node_of_spares_is_missed_by_nobody(tmp_path: Path, calm: Finished) -> None:
    training = Training.begin(tmp_path)
    held = {training.node_of(rank) for rank in range(4)}
    (spare,) = {row.node for row in training.facts().warm() if row.node is not None} - held
    training.strike(Wish(deed=Deed.NODE, node=spare))
    wait_until("spares again", lambda: len(training.facts().warm()) == 2, deadline_s=60)
    done = training.end()
    assert verdict(done, calm) == []
    assert done.incidents() == []


def test_an_agent_that_is_asked_to_be_away_is_missed_by_nobody(tmp_path: Path, calm: Finished) -> None:
    training = Training.begin(tmp_path)
    partition(training, calm)


@isolated
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
def test_a_link_that_is_down_for_less_than_the_limit_costs_only_time(tmp_path: Path, calm: Finished) -> None:
    training = Training.begin(tmp_path, "--isolate")
    training.strike(Wish(deed=Deed.NODE, node=training.node_of(2), how=How.POWER, for_s=4.0))
    step = training.step()
    wait_until("training again", lambda: training.step() > step + 5, deadline_s=30)
    done = training.end()
    assert verdict(done, calm) == []
    assert done.incidents() == []
