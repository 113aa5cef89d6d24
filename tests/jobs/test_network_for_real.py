"""A path of a node stays lost: its rank moves away while training goes on, and when the path is whole the taint goes.

Real jobs. In the first two the network core of the workers is pretended, so that all that it may say can be said; in
the last one it is real, and cuts its paths itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fake_core import wish
from tests.support.network_for_real import (
    FAR,
    LOST,
    Job,
    differing,
    finished,
    links_of,
    node_of,
    port,  # noqa: F401  a fixture
)
from tests.support.probing import free_port
from torchrelay.api.shown import NetworkView
from torchrelay.client.client import Client
from torchrelay.netpath.native.library import NotBuilt, find

pytestmark = pytest.mark.timeout(400)


def findings(view: NetworkView) -> list[str]:
    return [one.node for one in view.nodes for path in one.news.paths if path.finding is not None]


def test_a_persons_taint_stays_and_a_restarted_agent_goes_on(tmp_path: Path, port: int) -> None:
    job = Job(tmp_path, port)
    node = job.begun()
    job.verb("taint", node, "network/path0=cable:NoSchedule", "--yes", "--reason", "a bad cable")
    job.wish({node: LOST})
    job.until("found", lambda c: findings(c.view_network()) == [node])
    job.verb("restart-services", "--agents", "--yes")
    job.until("the next agent says so, too", lambda c: links_of(c.view_network(), node)[FAR].state == "down")
    job.wish({})
    job.until("whole", lambda c: not findings(c.view_network()))
    client = Client.of(job.run_dir)
    taint = job.taints(client)[node, "network/path0"]
    assert (taint.value, taint.effect, taint.reason) == ("cable", "NoSchedule", "a bad cable")
    assert (client.view_moves().moves, node_of(client, 1)) == ((), node)
    finished(job)


def test_with_the_real_core_a_path_that_is_cut_empties_a_node(tmp_path: Path) -> None:
    try:
        find()
    except NotBuilt as error:
        pytest.skip(str(error))
    job = Job(tmp_path, free_port("127.0.95.1"), "cored.py", "torchrelay.cli.main run")
    job.begun()
    client = Client.of(job.run_dir)
    # Each has one peer, and nothing tells which end it is: the one with the higher address leaves.
    lower, node = sorted(str(node_of(client, rank)) for rank in (0, 1))
    rank = next(rank for rank in (0, 1) if node_of(client, rank) == node)
    wish(job.wishes, **{node: "path1:drop@0s+600s"})
    taint = job.until("the taint", lambda c: job.taints(c).get((node, "network/path1")))
    assert taint.value == "down"
    assert "to its only peer, 127.0.96." in taint.reason
    job.until("the move", lambda c: c.view_moves().moves[-1].state == "done")
    client = Client.of(job.run_dir)
    assert [move.ranks for move in client.view_moves().moves] == [(rank,)]
    assert node_of(client, rank) not in (node, lower)
    job.until("who stays finds nothing lost", lambda c: lower not in findings(c.view_network()))
    # The process whose core had cut the path is gone: whoever knocks is answered.
    job.until("forgiven", lambda c: (node, "network/path1") not in job.taints(c))
    done = finished(job)
    assert differing(done) == []
    assert [row["resolution"] for row in done.incidents()] == ["clean"]
