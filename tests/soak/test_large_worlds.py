"""Worlds of five hundred ranks, and one of four thousand."""

from __future__ import annotations

import pytest

from torchrelay.simulation.world import run_large


@pytest.mark.parametrize(("seed", "nodes"), [*((seed, 64) for seed in range(12)), (10, 512)])
def test_no_invariant_is_violated(seed: int, nodes: int) -> None:
    result = run_large(seed, nodes)
    assert not result.violation, f"python -m torchrelay.simulation --seed {seed} --nodes {nodes}: {result.violation}"
