"""A path of a node stays lost: its rank moves away while training goes on, and when the path is whole the taint goes.

Real jobs. In the first two the network core of the workers is pretended, so that all that it may say can be said; in
the last one it is real, and cuts its paths itself.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.network_for_real import (
    FAR,
    LOST,
    NEAR,
    OTHER,
    Job,
    differing,
    finished,
    links_of,
    node_of,
    port,  # noqa: F401  a fixture
)
from tests.support.probing import deaf
from torchrelay.cli.network.net import network_page
from torchrelay.client.client import Client

pytestmark = pytest.mark.timeout(400)
PROBATION = "torchrelay/probation"


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
