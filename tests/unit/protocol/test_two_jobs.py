"""Two jobs in one cluster: what happens to one is nothing to the other."""

from __future__ import annotations

import pytest

from tests.support.telling import JOB, Story, raised, running
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import JobId, NodeId, Rank, WorkerId
from torchrelay.protocol.model.job import Job, JobPhase
from torchrelay.protocol.rules.cluster import orders

OTHER = JobId("other")
NODE = NodeId("node-0")


def two() -> Story:
    """Two jobs of two ranks and a spare each, on one node."""
    story = running(slots=6)
    spec = ev.JobSpec(job=OTHER, world_size=2, nproc_per_node=2, spares=1)
    story.hear(ev.JobSubmitted(spec=spec))
    story.settle()
    assert {job.phase for job in story.cluster.jobs.values()} == {JobPhase.RUNNING}
    return story


def of(story: Story, job: JobId) -> Job:
    return story.cluster.jobs[job]


def holder(story: Story, job: JobId, rank: int) -> WorkerId:
    worker = of(story, job).seats[Rank(rank)].worker
    assert worker is not None
    return worker


def test_each_has_its_own_workers() -> None:
    story = two()
    assert len(story.cluster.of_job(JOB)) == len(story.cluster.of_job(OTHER)) == 3
    assert not {w.worker for w in story.cluster.of_job(JOB)} & {w.worker for w in story.cluster.of_job(OTHER)}


def test_a_loss_in_one_leaves_the_other_alone_and_takes_none_of_its_spares() -> None:
    story = two()
    before = of(story, OTHER)
    spares = {worker.worker for worker in story.cluster.spares(OTHER)}
    story.lose(holder(story, JOB, 1), signal=9)
    story.settle()
    assert of(story, JOB).phase is JobPhase.RUNNING
    assert of(story, OTHER) == before
    assert {worker.worker for worker in story.cluster.spares(OTHER)} == spares


def test_a_holder_that_does_not_end_holds_up_the_ranks_of_its_own_job_only() -> None:
    story = two()
    story.hear(ev.WorkerHung(worker=holder(story, JOB, 1), evidence="stopped"))
    story.lose(holder(story, OTHER, 1), signal=9)
    assert of(story, JOB).seats[Rank(1)].worker is None
    assert of(story, OTHER).seats[Rank(1)].worker is not None
    story.answer((od.Interrupt, od.Decide))
    story.wait(10_000)
    assert "cannot be ended" in of(story, JOB).why
    assert "cannot be ended" not in of(story, OTHER).why


def test_starting_again_and_ending_concern_the_workers_of_one_job() -> None:
    story = two()
    story.hear(raised(story, 0, kind="refused"))
    assert of(story, JOB).phase is JobPhase.ENDING
    fenced = {order.worker for order in orders(story.cluster) if isinstance(order, od.Fence)}
    assert fenced == {worker.worker for worker in story.cluster.of_job(JOB)}
    story.settle()
    assert of(story, JOB).phase is JobPhase.ENDED
    assert of(story, OTHER).phase is JobPhase.RUNNING


@pytest.mark.parametrize("finishing", [JOB, OTHER])
def test_one_finishes_while_the_other_trains(finishing: JobId) -> None:
    story = two()
    job = of(story, finishing)
    for rank, seat in job.seats.items():
        assert seat.worker is not None
        story.hear(ev.WorkerFinished(job=finishing, generation=job.generation, worker=seat.worker, rank=rank))
    story.settle()
    assert of(story, finishing).phase is JobPhase.ENDED
    assert [each.phase for each in story.cluster.jobs.values() if each.phase is not JobPhase.ENDED] == [
        JobPhase.RUNNING
    ]
