"""The ledger's pauses, by a stopwatch: with orchestrators that hang or are killed while a rank is lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.jobs import wait_until
from tests.support.live import Live, Look
from torchrelay.api.endpoint import ENDPOINT
from torchrelay.api.shown import IncidentView

pytestmark = pytest.mark.timeout(240)

HANG_S = 4.0  # more than the clock takes for a busy machine
AWAY_S = 2.0  # so much more than TELLING_S that a pause counted from the return would be seen
TELLING_S = 0.5  # on a busy machine a death may be seen so late, and the pause is counted from then


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    live = Live.begin(tmp_path, seed=1, flags=[])
    yield live
    live.kill()


def lose(look: Look, rank: int) -> float:
    """SIGKILL of a rank; right before that."""
    pid = look.holder(rank).pid
    assert pid is not None
    begin = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return begin


def resolved(live: Live, number: int) -> IncidentView:
    """The incident, when training goes on."""
    live.until("training", lambda look: look.well and look.job.incidents.total == number)
    return live.client.view_incidents().incidents[-1]


def test_a_pause_counts_all_of_it_whoever_was_away(live: Live) -> None:
    look = live.settled()
    brain = live.whereabouts().orchestrator()
    os.kill(brain, signal.SIGSTOP)
    killed = lose(look, 1)
    wait_until("the hang", lambda: time.monotonic() - killed > HANG_S, deadline_s=HANG_S + 5)
    heard = time.monotonic()
    os.kill(brain, signal.SIGCONT)
    hung = resolved(live, 1)
    assert hung.pause_ms is not None
    assert heard - killed - TELLING_S <= hung.pause_ms / 1000 <= time.monotonic() - killed
    assert sum(hung.phases.values()) == hung.pause_ms

    look = live.settled()
    os.kill(brain, signal.SIGSTOP)
    killed, wall = lose(look, 2), time.time()
    wait_until("a while", lambda: time.monotonic() - killed > AWAY_S, deadline_s=AWAY_S + 5)
    os.kill(brain, signal.SIGKILL)
    gone = resolved(live, 2)
    back = (live.run_dir / ENDPOINT).stat().st_mtime  # when the next one began to listen
    assert back > wall
    assert gone.pause_ms is not None
    assert back - wall - TELLING_S <= gone.pause_ms / 1000 <= time.monotonic() - killed
    assert (hung.resolution, gone.resolution) == ("clean", "clean")
