"""What tests of paths for real share."""

from __future__ import annotations

from pathlib import Path

from examples.demo.bits import Trace, compare, read
from tests.support.jobs import run_job
from tests.support.path_training import PLAIN, training
from torchrelay.netpath.native.library import NotBuilt, find
from torchrelay.schedulers import network as net


def obstacle() -> str:
    """Why this cannot be run here."""
    try:
        find()
    except NotBuilt as error:
        return str(error)
    return net.obstacle()


def undisturbed(folder: Path, steps: int) -> Trace:
    """The same over loopback, with one path, on which nothing happens."""
    env = {"TORCHRELAY_CPU_BACKEND": "torchrelay"}
    done = run_job(folder / "calm", training(folder / "calm-losses", steps), PLAIN, env)
    assert done.code == 0, done.output[-3000:]
    return read(folder / "no digests", folder / "calm-losses")


def same_bits(folder: Path, steps: int) -> None:
    ours, calm = read(folder / "no digests", folder / "losses"), undisturbed(folder, steps)
    assert compare(calm, ours).differences == ()
    assert len(ours.losses) == 4 * steps
    assert len(ours.parameters) == 4
