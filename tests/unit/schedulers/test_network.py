"""Virtual nodes with links of their own: cut, parted from the orchestrator, and taken down without a trace."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.jobs import wait_until
from tests.support.network import A, B, isolated, traces
from torchrelay.cli.launch.run import plan
from torchrelay.client.runs import NotPossible
from torchrelay.launcher.local_run import slots_of
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.schedulers import network as net
from torchrelay.schedulers.machine import boot_id, read_machine, write_machine
from torchrelay.schedulers.network import Isolation, Network, plan_network
from torchrelay.schedulers.port import SchedulerError


@pytest.fixture
def isolation(tmp_path: Path) -> Iterator[Isolation]:
    made = Isolation.open(tmp_path, (A, B))
    yield made
    made.close()


def listen(isolation: Isolation, node: NodeId) -> subprocess.Popen[str]:
    """A process on the node that answers every connection with a word; at port 4000."""
    code = (
        "import socket; s = socket.create_server(('', 4000)); print('ready', flush=True)\n"
        "while True: c, _ = s.accept(); c.send(b'here'); c.close()"
    )
    process = subprocess.Popen(isolation.command(node, [sys.executable, "-c", code]), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def answers(network: Network, node: NodeId, asking: Isolation | None = None, by: NodeId = A) -> bool:
    """Whether who listens on the node is heard: from here, or from another node."""
    address = network.link(node).address
    if asking is None:
        try:
            with socket.create_connection((address, 4000), 0.5) as connection:
                return connection.recv(10) == b"here"
        except OSError:
            return False
    code = f"import socket; print(socket.create_connection(('{address}', 4000), 0.5).recv(10))"
    done = subprocess.run(asking.command(by, [sys.executable, "-c", code]), capture_output=True, text=True, timeout=20)
    return "here" in done.stdout


def test_names_fit_the_kernel_and_differ_from_run_to_run() -> None:
    names = [NodeId(f"node-{place}") for place in range(net.MOST_NODES)]
    one, other = plan_network(Path("/a"), names, 511), plan_network(Path("/b"), names, 511)
    assert one.tag != other.tag
    assert max(len(link.interface) for link in one.nodes) <= 15
    assert one.address == "198.19.255.1"
    assert len({link.address for link in one.nodes}) == net.MOST_NODES
    with pytest.raises(SchedulerError, match="there is room for"):
        plan_network(Path("/a"), [*names, NodeId("more")], 0)
    with pytest.raises(SchedulerError, match="no link of its own"):
        one.link(NodeId("more"))


def test_who_is_not_root_or_lacks_a_tool_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "need root" in net.obstacle()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    assert "install iproute2" in net.obstacle()


def test_where_a_run_is_can_be_read_back(tmp_path: Path) -> None:
    assert read_machine(tmp_path) is None
    write_machine(tmp_path, Path("/dev/shm/x"))
    found = read_machine(tmp_path)
    assert found is not None
    assert (found.boot, found.uid, found.pid, found.folder) == (boot_id(), os.getuid(), os.getpid(), "/dev/shm/x")


def test_a_run_that_cannot_isolate_is_refused_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    (tmp_path / "train.py").write_text("")
    with pytest.raises(NotPossible, match="--isolate is not possible: network namespaces need root") as refusal:
        plan(["--isolate", "--run-dir", str(tmp_path / "run"), str(tmp_path / "train.py")])
    assert refusal.value.code == 2
    assert not (tmp_path / "run").exists()


def test_spare_nodes_come_after_the_others_and_hold_spares_only(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    words = ["--nodes", "2", "--nproc-per-node", "2", "--spares", "1", "--spare-nodes", "2", "--run-dir"]
    made = plan([*words, str(tmp_path / "run"), str(tmp_path / "train.py")])
    assert (made.spec.world_size, made.spec.spares, made.spec.nodes) == (4, 5, 2)
    assert slots_of(made) == {"node-0": 3, "node-1": 2, "node-2": 2, "node-3": 2}


@isolated
def test_nodes_reach_one_another_until_a_link_is_cut(isolation: Isolation) -> None:
    network = isolation.network
    process = listen(isolation, B)
    try:
        wait_until("B", lambda: answers(network, B), deadline_s=10)
        wait_until("B from A", lambda: answers(network, B, isolation), deadline_s=10)
        net.cut(network, B)
        assert net.is_cut(network, B)
        assert not answers(network, B)
        assert not answers(network, B, isolation)
        net.mend(network, B)
        assert not net.is_cut(network, B)
        wait_until("B", lambda: answers(network, B), deadline_s=10)
    finally:
        process.kill()
        process.communicate()


@isolated
def test_a_node_parted_from_the_orchestrator_still_has_the_others(isolation: Isolation) -> None:
    network = isolation.network
    process = listen(isolation, B)
    try:
        net.part(network, B)
        assert not answers(network, B)
        wait_until("B from A", lambda: answers(network, B, isolation), deadline_s=10)
        net.rejoin(network, B)
        wait_until("B", lambda: answers(network, B), deadline_s=10)
    finally:
        process.kill()
        process.communicate()


@isolated
def test_nothing_is_left_and_no_process_lives_on_in_it(tmp_path: Path) -> None:
    isolation = Isolation.open(tmp_path, (A, B))
    process = listen(isolation, B)
    assert len(traces(isolation.network.tag)) == 5
    isolation.close()
    assert process.wait(10) == -9
    process.communicate()
    assert traces(isolation.network.tag) == []


@isolated
def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from torchrelay.schedulers.network import Isolation\n"
        "print(Isolation.open(Path(sys.argv[1]), ['node-0']).network.tag); os.kill(os.getpid(), 9)"
    )
    (tmp_path / "killed").mkdir()
    done = subprocess.run(
        [sys.executable, "-u", "-c", code, str(tmp_path / "killed")], stdout=subprocess.PIPE, text=True, timeout=30
    )
    tag = done.stdout.strip()
    assert len(traces(tag)) == 3
    living = Isolation.open(tmp_path / "a", (A,))
    try:
        assert traces(tag) == []
        Isolation.open(tmp_path / "b", (A,)).close()
        assert len(traces(living.network.tag)) == 3
        with pytest.raises(SchedulerError, match="has its network already"):
            Isolation.open(tmp_path / "a", (A,))
    finally:
        living.close()
