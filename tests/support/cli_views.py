"""What tests of cli views share."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.brain import JOB, NODE, RecordingLink, serving, train
from torchrelay.cli import main as command
from torchrelay.protocol.messages.events import PrivateRecord, WorkerExited, WorkerReported
from torchrelay.protocol.messages.ids import Generation, Point, Rank, WorkerId, WorkerPhase

RECORD = PrivateRecord(Point(7), b"rng")


@pytest.fixture(scope="module")
def journal_of_a_recovery(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder whose orchestrator ended in the middle of an incident: rank 1 killed, rank 0 has reported."""
    folder = tmp_path_factory.mktemp("run")

    async def story() -> None:
        async with serving(folder) as service:
            await train(service, RecordingLink())
            exited = WorkerExited(
                worker=WorkerId("node-0.1.1"), node=NODE, signal=9, cause="SIGKILL", private=(RECORD,)
            )
            await service.put(exited)
            reported = WorkerReported(
                job=JOB,
                generation=Generation(2),
                worker=WorkerId("node-0.0.0"),
                rank=Rank(0),
                committed=Point(7),
                phase=WorkerPhase.COMPUTING,
                pending=Point(8),
            )
            await service.put(reported)

    asyncio.run(story())
    return folder


def torchrelay(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Carry out a command in this process: exit code, stdout, stderr."""
    with pytest.raises(SystemExit) as caught:
        command.main(list(words))
    told = capsys.readouterr()
    code = caught.value.code
    assert isinstance(code, int)
    return code, told.out, told.err
