"""A path of a node stays lost: its rank moves away while training goes on, and when the path is whole the taint goes.

Real jobs. In the first two the network core of the workers is pretended, so that all that it may say can be said; in
the last one it is real, and cuts its paths itself.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fake_core import wish
from tests.jobs import SCRIPTS, Finished, ask_until, end_job, torchrelay
from tests.test_probing import deaf, free_port
from tests.twins import undisturbed
from torchrelay.api.shown import NetworkView, TaintView
from torchrelay.cli.network.net import network_page
from torchrelay.client.client import Client
from torchrelay.netpath.native.library import NotBuilt, find
from torchrelay.wire.messages.pathnews import LinkNews

pytestmark = [pytest.mark.slow, pytest.mark.jobs, pytest.mark.timeout(400)]

NEAR, FAR, OTHER = "127.0.94.1", "127.0.94.2", "127.0.94.3"
NODES = ("node-0", "node-1", "node-2")
WELL = {"links": [[0, "", NEAR, FAR], [0, "", NEAR, OTHER]], "rate": 1e6}
LOST = WELL | {"lost": [[NEAR, FAR], [NEAR, OTHER]]}
PROBATION = "torchrelay/probation"
LAUNCHER = "tests.net_run"  # pretends that the core is built


class Job:
    """Two ranks on two nodes, and a node with a spare."""

    def __init__(self, folder: Path, port: int, script: str = "pathed.py", launcher: str = LAUNCHER) -> None:
        self.run_dir = folder / "run"
        self.wishes = folder / "wishes.json"
        self.wish({})
        self.live = folder / "live"
        self.live.mkdir()
        (self.live / "plan.json").write_text("[]")
        flags = ["--nodes", "2", "--nproc-per-node", "1", "--spare-nodes", "1", "--net-failover", "--net-down", "1s",
                 "--net-heal", "2s", "--net-probe-port", str(port), "--run-dir", str(self.run_dir)]  # fmt: skip
        words = [str(SCRIPTS / script), str(self.wishes), "--live", str(self.live), "--pace", "0.05",
                  "--steps", "1000000"]  # fmt: skip
        digests = folder / "run-digests"
        digests.mkdir()
        root = str(SCRIPTS.parent.parent)
        env = {"TORCHRELAY_DIGESTS": str(digests), "OMP_NUM_THREADS": "1", "PYTHONPATH": with_folder(root)}
        with (folder / "run.out").open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *launcher.split(), *flags, *words], env={**os.environ, **env}, stdout=out,
                stderr=subprocess.STDOUT, text=True, cwd=root,
            )  # fmt: skip

    def wish(self, others: dict[str, Any]) -> None:
        """All nodes' paths are whole, but for these."""
        wish(self.wishes, **(dict.fromkeys(NODES, WELL) | others))

    def begun(self) -> str:
        """Trained a bit, with a warm spare, and the links of the node of rank 1 are seen: that node."""
        self.until("trained with a spare", lambda c: (c.job().step or 0) > 3 and c.job().spares.warm == 1)
        node = str(node_of(Client.of(self.run_dir), 1))
        self.until(
            "its links are seen",
            lambda c: "up" in {link.state for link in links_of(c.view_network(), node).values()},
        )
        return node

    def until(self, what: str, fact: Callable[[Client], Any]) -> Any:
        return ask_until(self.process, self.run_dir, what, fact, deadline_s=120)

    def taints(self, client: Client) -> dict[tuple[str, str], TaintView]:
        return {(taint.place, taint.key): taint for node in client.view_nodes().nodes for taint in node.taints}

    def verb(self, *words: str) -> str:
        done = torchrelay(*words, "--run-dir", str(self.run_dir))
        assert done.returncode == 0, done.stderr
        return done.stdout


def with_folder(folder: str) -> str:
    return os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH", "")])])


def node_of(client: Client, rank: int) -> str | None:
    return next(row.node for row in client.view_ranks().ranks if row.rank == rank)


def links_of(view: NetworkView, node: str) -> dict[str, LinkNews]:
    found = [one for one in view.nodes if one.node == node]
    return {link.remote: link for one in found for path in one.news.paths for link in path.links}


@pytest.fixture
def port() -> int:
    return free_port(FAR)


@pytest.fixture
def cut(port: int) -> Iterator[Callable[[], None]]:
    """Nothing comes back from the peers on this port, until it is called: then the way is whole."""
    healed, ready = threading.Event(), threading.Event()

    def hold() -> None:
        with deaf(FAR, port), deaf(OTHER, port):
            ready.set()
            healed.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    assert ready.wait(20)

    def heal() -> None:
        healed.set()
        thread.join()

    yield heal
    heal()


def finished(job: Job) -> Finished:
    """Let it end after the epoch."""
    (job.live / "stop").touch()
    done = end_job(job.process, job.run_dir, timeout_s=120)
    assert done.code == 0, done.output[-3000:]
    return done


def number(point: str) -> tuple[int, int]:
    step, _, section = point.partition("+")
    return int(step), int(section or 0)


def differing(done: Finished) -> list[tuple[int, str]]:
    """Where it differs from an undisturbed run, up to the point at which it was told to end."""
    last = max(number(point) for _, point in done.digests)
    script = [str(SCRIPTS / "faulty.py"), "--steps", str(last[0])]
    calm = undisturbed(script, world=2)
    points = {key: digests for key, digests in calm.digests.items() if number(key[1]) < last}
    assert len(points) > 100
    return [key for key, digests in points.items() if done.digests.get(key) != digests]


def findings(view: NetworkView) -> list[str]:
    return [one.node for one in view.nodes for path in one.news.paths if path.finding is not None]


@pytest.mark.soak
def test_a_lost_path_empties_its_node_and_a_healed_one_is_forgiven(
    tmp_path: Path, port: int, cut: Callable[[], None]
) -> None:
    job = Job(tmp_path, port)
    node = job.begun()
    job.wish({node: LOST})
    taint = job.until("the taint", lambda c: job.taints(c).get((node, "network/path0")))
    assert (taint.value, taint.effect, taint.source) == ("down", "NoExecute", "network")
    told = re.sub(r"lost for [1-9]\d* s", "lost for SOME s", taint.reason)
    assert f"path {NEAR} lost for SOME s (silent), to all 2 peers ({FAR}, {OTHER})" in told
    job.until("the move", lambda c: node_of(c, 1) != node and c.view_moves().moves[-1].state == "done")
    (move,) = Client.of(job.run_dir).view_moves().moves
    assert (move.kind, move.ranks) == ("pre-emptive", (1,))
    assert "network/path0" in move.reason

    # Nobody uses the path now: its agent knocks, and nothing answers.
    job.until("nobody is left", lambda c: links_of(c.view_network(), node)[FAR].state == "unused")
    job.until("it has knocked", lambda c: links_of(c.view_network(), node)[FAR].state_s > 5)
    page = network_page(Client.of(job.run_dir).view_network())
    assert re.search(rf"{node}: path {re.escape(NEAR)} lost for [1-9]\d* s \(silent\)", page), page
    assert f"{node}: {node} network/path0=down:NoExecute by network" in page
    cut()
    job.until("forgiven", lambda c: (node, "network/path0") not in job.taints(c))
    assert (node, PROBATION) in job.taints(Client.of(job.run_dir))

    done = finished(job)
    assert differing(done) == []
    assert [(row["kind"], row["resolution"], row["steps_lost"]) for row in done.incidents()] == [
        ("pre-emptive", "clean", 0)
    ]


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
