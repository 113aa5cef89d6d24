"""Groups of backends that cannot be reconfigured: let be if they talk to nobody, refused at protect() if they do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed, run_case

pytestmark = pytest.mark.timeout(240)


def test_a_mesh_with_fake_dimensions_trains_through_a_fault(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "fake-dimensions", strike="grad:8:1")
    assert verdict.fate is Fate.EQUAL, verdict


@pytest.mark.parametrize("mode", ["", "default", "late"])
def test_an_unknown_backend_of_several_ranks_is_refused_when_the_script_has_joined(tmp_path: Path, mode: str) -> None:
    ran = run_case(tmp_path / "own", "own-backend", mode=mode)
    assert ran.code == 93, ran.output
    assert "has the backend homemade, which cannot be connected again after a fault" in ran.reason, ran.output
    assert "Use gloo, nccl or torchrelay for groups of several ranks" in ran.reason, ran.output


def test_a_script_that_never_joins_may_have_any_backend(tmp_path: Path) -> None:
    ran = run_case(tmp_path / "own", "own-backend", mode="plain")
    assert ran.code == 0, ran.output
    totals = {value for (_, step, name), value in ran.lines.items() if (step, name) == ("1", "total")}
    assert totals == {f'"{(3.0).hex()}"'}, ran.lines
