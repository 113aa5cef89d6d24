"""A run whose orchestrator is away for good: what its agents write decides when it is over."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchrelay.agent.allegiance import Allegiance
from torchrelay.launcher.following import PATIENCE_S, STILL_S, Watch, read_all
from torchrelay.protocol.messages.ids import JobId, NodeId, Point, Rank, WorkerId, WorkerPhase
from torchrelay.wire.files.alone import FILE, Alone, Lone, write_alone
from torchrelay.wire.messages.codec import WireError

JOB = JobId("job")


def lone(rank: int | None, phase: WorkerPhase = WorkerPhase.COMPUTING, step: int = 5, **changes: object) -> Lone:
    values: dict[str, object] = {
        "worker": WorkerId(f"w{rank}"), "job": JOB, "rank": None if rank is None else Rank(rank), "phase": phase,
        "point": Point(step), **changes,
    }  # fmt: skip
    return Lone(**values)  # type: ignore[arg-type]


def told(*workers: Lone) -> list[Alone]:
    return [Alone(workers=workers)]


DONE = WorkerPhase.FINISHED


class TestWatch:
    def test_it_is_over_when_every_rank_has_finished_and_not_before(self) -> None:
        watch = Watch(JOB, 2)
        assert watch.look(told(lone(0, DONE), lone(1)), 0).over is None
        assert watch.look(told(lone(0, DONE), lone(1), lone(None)), 1).over is None
        assert watch.look(told(lone(0, DONE), lone(1, DONE), lone(None)), 2).over is True

    def test_ranks_of_several_nodes_count_together(self) -> None:
        both = [*told(lone(0, DONE)), *told(lone(1, ended="exited with 0", code=0))]
        assert Watch(JOB, 2).look(both, 0).over is True

    def test_a_spare_that_ended_with_0_is_no_rank(self) -> None:
        assert Watch(JOB, 1).look(told(lone(0), lone(None, ended="exited with 0", code=0)), 0).over is None

    def test_two_workers_that_held_one_rank_count_once(self) -> None:
        twice = [*told(lone(0, DONE), lone(1)), *told(lone(0, DONE, worker=WorkerId("of a node that was lost")))]
        assert Watch(JOB, 2).look(twice, 0).over is None

    def test_workers_of_another_job_do_not_count(self) -> None:
        assert Watch(JOB, 1).look(told(lone(0), lone(0, DONE, job=JobId("another"))), 0).over is None

    def test_ranks_that_were_let_go_before_are_missing_and_it_is_over(self) -> None:
        watch = Watch(JOB, 2)
        assert watch.look(told(lone(1, DONE)), 0).over is None
        assert watch.look(told(lone(1, DONE)), 0, finishing=True).over is True

    def test_a_lost_rank_is_said_once_and_ends_it_after_the_workers_patience(self) -> None:
        watch = Watch(JOB, 2)
        lost = told(lone(0, WorkerPhase.STOPPED), lone(1, ended="SIGKILL"))
        first = watch.look(lost, 100)
        assert (first.over, "rank 1: SIGKILL" in first.say, "600 s" in first.say) == (None, True, True)
        assert watch.look(lost, 100 + PATIENCE_S - 1) == type(first)()
        assert watch.look(lost, 100 + PATIENCE_S + 15).over is False

    def test_when_no_rank_is_left_it_is_over_at_once(self) -> None:
        ends = told(lone(0, ended="exited with 92", code=92), lone(1, ended="SIGKILL"), lone(None))
        found = Watch(JOB, 2).look(ends, 0)
        assert found.over is False
        assert "rank 0: exited with 92, rank 1: SIGKILL" in found.say

    def test_ranks_that_come_no_further_have_an_hour(self) -> None:
        watch = Watch(JOB, 1)
        for now in range(0, 10):
            assert watch.look(told(lone(0, step=now)), now * STILL_S / 2).over is None
        last = 9 * STILL_S / 2
        assert watch.look(told(lone(0, step=9)), last + STILL_S - 1).over is None
        assert watch.look(told(lone(0, step=9)), last + STILL_S).over is False


class TestFiles:
    def test_a_run_is_alone_when_all_its_agents_are(self, tmp_path: Path) -> None:
        nodes = [NodeId("node-0"), NodeId("node-1")]
        for node in nodes:
            (tmp_path / node).mkdir()
        assert read_all(tmp_path, nodes) is None
        write_alone(tmp_path / "node-0", Alone(workers=(lone(0),)))
        assert read_all(tmp_path, nodes) is None
        write_alone(tmp_path / "node-1", Alone())
        assert read_all(tmp_path, nodes) == [Alone(workers=(lone(0),)), Alone()]
        (tmp_path / "node-1" / FILE).write_text("{")
        assert read_all(tmp_path, nodes) is None
        assert read_all(tmp_path, []) is None


class TestAllegiance:
    def test_an_agent_obeys_one_journal_and_its_highest_lease_also_after_its_own_restart(self, tmp_path: Path) -> None:
        first = Allegiance(tmp_path)
        first.accept("ours", 3)
        for agent in (first, Allegiance(tmp_path)):
            with pytest.raises(WireError, match="lease 2 is over"):
                agent.accept("ours", 2)
            with pytest.raises(WireError, match="another journal"):
                agent.accept("begun anew", 9)
            agent.accept("ours", 3)
        Allegiance(tmp_path).accept("ours", 4)
        with pytest.raises(WireError, match="lease 3 is over"):
            Allegiance(tmp_path).check(3)

    def test_a_file_that_cannot_be_read_forbids_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "allegiance.json").write_text("{")
        Allegiance(tmp_path).accept("any", 1)
