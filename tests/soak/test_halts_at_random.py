"""Halts at any moment: called off early or late, or a rank changes hands; the bits are the same."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.support.by_hand import ByHand, boundary_of
from tests.support.jobs import SCRIPTS
from tests.support.stage import bits
from torchrelay.protocol.messages.events import CollectiveFailed, WorkerReady
from torchrelay.protocol.messages.ids import START
from torchrelay.protocol.messages.orders import Decide, Verdict

pytestmark = pytest.mark.timeout(300)

RANKS = range(4)
STEPS = 60
SEED = int(os.environ.get("SEED", "1"))


def open_stage(folder: Path) -> ByHand:
    folder.mkdir()
    return ByHand(folder / "stage", [str(SCRIPTS / "faulty.py"), "--steps", str(STEPS), "--marks", str(folder)])


def disturb(stage: ByHand, chance: random.Random) -> str:
    """One halt; what became of it."""
    until = stage.step() + chance.randrange(4)
    stage.until(lambda: stage.step() >= min(until, STEPS), "some steps")
    mover = chance.choice(RANKS) if chance.random() < 0.15 else None
    target = None if mover is None else stage.prepare(mover)
    boundary = boundary_of(stage.halt())
    way = chance.choice(("at once", "on the way", "there"))
    if mover is None or target is None or boundary == START:
        if way == "on the way":
            stage.order_all(Decide, verdict=Verdict.GO_ON, point=boundary)
        elif way == "there":
            assert {ready.point for ready in stage.stand_at(boundary).values()} == {boundary}
        stage.resume(None if way == "at once" else boundary)
        return way
    outgoing = stage.actor(mover)
    private = stage.stand_at(boundary, outgoing=mover)[mover].private
    stage.bring(target, mover, boundary, private, (stage.source(outgoing, mover),))
    stage.new_generation()
    stage.holders[mover] = target
    stage.order(Decide, mover, outgoing, verdict=Verdict.REDO, point=boundary)
    stage.reconfigure()
    stage.await_answers(WorkerReady, [outgoing])
    stage.restore(mover, boundary, (stage.source(outgoing, mover),))
    stage.resume(boundary)
    stage.send(outgoing, 9)
    stage.await_end(outgoing)
    return "moved"


def test_halts_at_random_moments(tmp_path: Path) -> None:
    found = []
    for name in ("calm", "disturbed"):
        stage = open_stage(tmp_path / name)
        chance = random.Random(SEED)
        ways: list[str] = []
        try:
            stage.train()
            while name == "disturbed" and stage.step() < STEPS - 10:
                ways.append(disturb(stage, chance))
            stage.finish()
            found.append(bits(stage))
            assert stage.of(CollectiveFailed) == []
        finally:
            stage.close()
    assert set(ways) == {"at once", "on the way", "there", "moved"}, ways
    assert found[0] == found[1]
