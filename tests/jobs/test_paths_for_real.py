"""Training over several network paths, of which some are lost: nodes with links of their own, which are really cut.

How long a step takes meanwhile is for `make bench NAME=paths`.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.path_training import A, B, Training
from tests.support.paths_for_real import obstacle, same_bits
from torchrelay.schedulers import network as net

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(obstacle()), reason=obstacle()),
]  # fmt: skip


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
