"""What tests of network for real share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_core import wish
from tests.support.jobs import SCRIPTS, Finished, ask_until, end_job, torchrelay
from tests.support.probing import free_port
from tests.support.twins import undisturbed
from torchrelay.api.shown import NetworkView, TaintView
from torchrelay.client.client import Client
from torchrelay.wire.messages.pathnews import LinkNews

NEAR, FAR, OTHER = "127.0.94.1", "127.0.94.2", "127.0.94.3"
NODES = ("node-0", "node-1", "node-2")
WELL = {"links": [[0, "", NEAR, FAR], [0, "", NEAR, OTHER]], "rate": 1e6}
LOST = WELL | {"lost": [[NEAR, FAR], [NEAR, OTHER]]}
LAUNCHER = "tests.support.net_run"  # pretends that the core is built


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
                [sys.executable, "-m", *launcher.split(), *flags, *words],
                env={**os.environ, **env},
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=root,
            )

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
