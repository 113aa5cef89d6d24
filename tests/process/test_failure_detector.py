"""Who is silent and who hangs: no false alarm in an hour of ordinary life, and a hang is found in seconds."""

from __future__ import annotations

import pytest

from tests.support.failure_detector import Ward
from torchrelay.protocol.messages.ids import WorkerPhase


@pytest.mark.parametrize("phase", [phase for phase in WorkerPhase if phase is not WorkerPhase.FINISHED])
def test_nobody_hangs_for_whom_nobody_waits(phase: WorkerPhase) -> None:
    ward = Ward()
    ward.set(1, phase=phase)
    if phase is WorkerPhase.SECTION:
        for rank in (0, 2, 3):
            ward.set(rank, phase=phase)
    assert ward.live(4_000_000) == []
