"""Training over several network paths, of which some are lost: nodes with links of their own, which are really cut.

How long a step takes meanwhile is for `make bench NAME=paths`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.jobs import torchrelay
from tests.support.path_training import FAILOVER, B, Training
from tests.support.paths_for_real import obstacle, same_bits
from torchrelay.api.shown import NodeView
from torchrelay.client.client import Client
from torchrelay.protocol.messages.ids import NodeId

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(obstacle()), reason=obstacle()),
]  # fmt: skip


def test_ranks_leave_a_node_whose_path_stays_lost_and_it_is_forgiven(tmp_path: Path) -> None:
    steps = 1200
    flags = ["--spare-nodes", "1", "--net-down", "3s", "--net-heal", "2s"]
    job = Training(tmp_path, steps, [*FAILOVER, *flags])
    job.until("two warm spares", lambda c: c.job().spares.warm == 2)
    job.await_steps(10)
    victim = NodeId(str(homes(Client.of(job.run_dir))[0]))
    told = torchrelay(
        "chaos", "path", "--node", victim, "--path", "1", "--no-wait", "--yes", "--run-dir", str(job.run_dir)
    )
    assert told.returncode == 0, told.stderr
    taint = job.until("the taint", lambda c: taints(c, victim).get("network/path1"))
    address = re.escape(job.network.link(victim).path(1).address)
    assert re.search(rf"path1 \({address}\) lost for ([3-9]|\d\d) s", taint), taint
    job.until("the move", lambda c: c.view_moves().moves[-1].state == "done")
    assert victim not in homes(Client.of(job.run_dir))
    job.await_steps(10)
    mended = torchrelay("chaos", "mend", "--node", victim, "--no-wait", "--yes", "--run-dir", str(job.run_dir))
    assert mended.returncode == 0, mended.stderr
    job.until("forgiven", lambda c: "network/path1" not in taints(c, victim))
    done = job.end()
    assert [(row["kind"], row["resolution"], row["steps_lost"]) for row in done.incidents()] == [
        ("pre-emptive", "clean", 0)
    ]
    same_bits(tmp_path, steps)


def homes(client: Client) -> list[str | None]:
    """The nodes of the ranks."""
    return [row.node for row in client.view_ranks().ranks if row.rank is not None]


def taints(client: Client, node: NodeId) -> dict[str, str]:
    """Why, by key."""
    found: list[NodeView] = [one for one in client.view_nodes().nodes if one.node == node]
    return {taint.key: taint.reason for one in found for taint in one.taints if taint.place == node}


def test_a_path_can_be_lost_by_the_command_line_and_comes_back(tmp_path: Path) -> None:
    job = Training(tmp_path, 400)
    job.await_steps(10)
    words = ["chaos", "path", "--node", B, "--path", "2", "--how", "drop", "--for", "2s", "--yes", "-o", "json"]
    done = torchrelay(*words, "--run-dir", str(job.run_dir), timeout_s=100)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["resolved"] is True
    assert told["expects"] == "no incident: collectives go on over the other paths of node-1"
    again = torchrelay("chaos", "path", "--node", B, "--path", "3", "--yes", "--run-dir", str(job.run_dir))
    assert again.returncode == 2
    assert "node-1 has no path 3; it has paths 1 to 2" in again.stderr
    assert job.end().incidents() == []
