"""What workers print: no print fails because of our files, logs are bounded, and what is left out is said."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.agent_stage import offspring
from tests.support.brain import wait_for
from tests.support.forkserver import Server, serving
from torchrelay.agent.workers.forks import Child, Ended


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    yield from serving(Server(tmp_path, linger_s=30.0))


class TestScribe:
    def test_from_its_mark_on_output_goes_to_the_ranks_log(self, server: Server) -> None:
        server.fork("w1", "become_a_rank", "7")
        server.hear(Child)
        server.hear(Ended)
        assert server.log("w1").read_text() == "nobody yet\n"
        assert server.log("rank-7").read_text() == "rank 7\na child of rank 7\n"

    def test_another_scribe_goes_on_where_one_was_killed(self, server: Server) -> None:
        scribe = next(iter(offspring(server.process.pid)))
        server.fork("w1", "print_on", "7")
        child = server.hear(Child)
        for seen in (1, 100):

            def lines(more: int) -> int:
                found = server.log("rank-7").read_text().splitlines() if server.log("rank-7").exists() else []
                return len(found) if len(found) >= more else 0

            def others(old: int = scribe) -> set[int]:
                return set(offspring(server.process.pid)) - {child.pid, old}

            before = wait_for("lines", partial(lines, seen), 60)
            os.kill(scribe, signal.SIGKILL)
            scribe = wait_for("another scribe", others, 60).pop()
            wait_for("further lines", partial(lines, before + 1), 60)
        os.kill(child.pid, signal.SIGTERM)
        server.hear(Ended)
        numbers = [int(line) for line in server.log("rank-7").read_text().splitlines()]
        assert numbers == sorted(set(numbers))
        assert len(numbers) >= numbers[-1] - 200  # what a scribe had taken and not written when it was killed is lost
