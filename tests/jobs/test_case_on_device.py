"""What scripts keep on a device, here on the CPU. With a GPU, and all kinds: `python -m tests.on_device`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed, migrate
from tests.on_device import kinds

pytestmark = pytest.mark.timeout(240)

# Gradients of the step before are those of the loss then: no rank has them when a step is made again.
READ = ["stale", "zeroed", "momentum"]
NOT_CARRIED = ["large", "bigger", "average", "nested", "result", "prefetch"]
SHOWN = [kind for kind in kinds() if kind not in (*READ, *NOT_CARRIED, "compiled")]


@pytest.mark.parametrize("mode", SHOWN)
def test_it_is_carried_beside_a_scaler_that_is_switched_off(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, "on-device", mode=mode, strike="grad:12:1,after:20:0")
    assert verdict.fate is Fate.EQUAL, verdict


@pytest.mark.parametrize("mode", READ)
@pytest.mark.parametrize("strike", ["grad:12:1", "after:12:0"])
def test_gradients_that_a_step_has_left_are_not_read_by_the_next(tmp_path: Path, mode: str, strike: str) -> None:
    verdict = disturbed(tmp_path, "on-device", mode=mode, strike=strike)
    assert verdict.fate is Fate.REFUSED, verdict
    assert "that an earlier step has left" in verdict.reason, verdict


def test_nor_by_the_target_of_a_move(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "on-device", mode="stale", drive=migrate(1, at=12))
    assert verdict.fate is Fate.REFUSED, verdict
    assert "that an earlier step has left" in verdict.reason, verdict


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("large", "is too large to be carried"), ("bigger", "is too large to be carried"),
        ("average", "protect() was not given it"), ("prefetch", "cannot be entered in the middle"),
    ],
)  # fmt: skip
def test_or_refused(tmp_path: Path, mode: str, why: str) -> None:
    verdict = disturbed(tmp_path, "on-device", mode=mode, strike="grad:12:1")
    assert verdict.fate is Fate.REFUSED, verdict
    assert why in verdict.reason, verdict
