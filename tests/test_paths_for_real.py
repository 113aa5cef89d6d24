"""Training over several network paths, of which some are lost: nodes with links of their own, which are really cut.

How long a step takes meanwhile is for `make bench NAME=paths`.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from examples.demo.bits import Trace, compare, read
from tests.jobs import run_job, torchrelay
from tests.path_training import FAILOVER, PLAIN, A, B, Training, training
from torchrelay.api.shown import NodeView
from torchrelay.client.client import Client
from torchrelay.netpath.native.library import NotBuilt, find
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.schedulers import network as net


def obstacle() -> str:
    """Why this cannot be run here."""
    try:
        find()
    except NotBuilt as error:
        return str(error)
    return net.obstacle()


pytestmark = [
    pytest.mark.slow, pytest.mark.jobs, pytest.mark.timeout(400),
    pytest.mark.skipif(bool(obstacle()), reason=obstacle()),
]  # fmt: skip


def undisturbed(folder: Path, steps: int) -> Trace:
    """The same over loopback, with one path, on which nothing happens."""
    env = {"TORCHRELAY_CPU_BACKEND": "torchrelay"}
    done = run_job(folder / "calm", training(folder / "calm-losses", steps), PLAIN, env)
    assert done.code == 0, done.output[-3000:]
    return read(folder / "no digests", folder / "calm-losses")


def same_bits(folder: Path, steps: int) -> None:
    ours, calm = read(folder / "no digests", folder / "losses"), undisturbed(folder, steps)
    assert compare(calm, ours).differences == ()
    assert len(ours.losses) == 4 * steps
    assert len(ours.parameters) == 4


def test_a_cut_a_blackhole_and_a_storm_of_flaps_do_not_touch_training(tmp_path: Path) -> None:
    steps = 400
    job = Training(tmp_path, steps)
    job.await_steps(10)
    network = job.network
    for lose in (net.cut_path, net.swallow_path):
        lose(network, A, 1)
        job.await_state(A, 1, {"down"})
        job.await_steps(10)
        net.mend_path(network, A, 1)
        job.await_state(A, 1, {"up"})
    chance = random.Random(7)
    for _ in range(6):
        node, path = chance.choice((A, B)), chance.choice((1, 2))
        net.cut_path(network, node, path)
        job.await_steps(1)
        net.mend_path(network, node, path)
        job.await_steps(1)
    done = job.end()
    assert done.incidents() == []
    same_bits(tmp_path, steps)


@pytest.mark.soak
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


@pytest.mark.soak
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
