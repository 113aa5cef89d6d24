"""Large worlds: the same faults in jobs of many ranks, and a rack that is lost with all that runs on it."""

from __future__ import annotations

import pytest

from torchrelay.protocol.model.job import Job, JobPhase
from torchrelay.protocol.model.state import Cluster
from torchrelay.protocol.recovery import ending
from torchrelay.simulation.model.large import RACK, SLOTS, enlarge
from torchrelay.simulation.model.plans import FaultKind, draw
from torchrelay.simulation.world import run_large

NODES = 16
SEEDS = range(12)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_invariant_is_violated(seed: int) -> None:
    result = run_large(seed, NODES)
    assert not result.violation, f"python -m torchrelay.simulation --seed {seed} --nodes {NODES}: {result.violation}"


def test_most_of_them_lose_a_rack() -> None:
    plans = [enlarge(draw(seed), NODES) for seed in SEEDS]
    assert all(plan.spec.world_size == NODES * SLOTS for plan in plans)
    assert {plan.rack for plan in plans} == {min(RACK, NODES // 4)}
    lost = [plan for plan in plans if any(strike.kind is FaultKind.RACK for strike in plan.strikes)]
    assert len(lost) >= len(SEEDS) // 2


def test_a_core_that_counts_each_loss_as_an_attempt_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def counting(cluster: Cluster, job: Job, reason: str, *, in_vain: bool = True) -> Cluster:
        counts = in_vain and job.phase is not JobPhase.AGREEING
        job = job if counts else job.with_attempts(fruitless=job.attempts.fruitless + 1)
        return interrupt_job(cluster, job, reason, in_vain=in_vain)

    interrupt_job = ending.interrupt_job
    monkeypatch.setattr(ending, "interrupt_job", counting)
    monkeypatch.setattr(ending, "nobody_has_reported", lambda _job: False)
    found = [result.violation for result in map(run_large, (0, 7, 11), (NODES,) * 3) if result.violation]
    assert "in a row committed nothing" in found[0]
