"""Virtual nodes with links of their own: cut, parted from the orchestrator, and taken down without a trace."""

from __future__ import annotations

from pathlib import Path

from tests.support.jobs import SCRIPTS, start_job, wait_until
from tests.support.network import A, B, isolated, traces
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.schedulers import network as net
from torchrelay.schedulers.local import read_file
from torchrelay.schedulers.network import Network


@isolated
def test_an_isolated_run_that_is_killed_leaves_nothing_that_the_next_does_not_remove(tmp_path: Path) -> None:
    script = [str(SCRIPTS / "faulty.py"), "--steps", "5000", "--pace", "0.1"]
    process = start_job(tmp_path / "run", script, ["--nodes", "2", "--isolate"])
    wait_until("the network", lambda: read_file(tmp_path / "run" / net.RECORD, Network), deadline_s=30)
    network = read_file(tmp_path / "run" / net.RECORD, Network)
    assert network is not None
    wait_until("an agent", lambda: inside(network, A), deadline_s=30)
    process.kill()
    process.wait(10)
    wait_until("the end of its processes", lambda: not inside(network, A) and not inside(network, B), deadline_s=60)
    assert traces(network.tag)
    net.clear_leftovers()
    assert traces(network.tag) == []


def inside(network: Network, node: NodeId) -> list[str]:
    """The processes of a node."""
    return net.ip("netns", "pids", network.link(node).namespace).split()
