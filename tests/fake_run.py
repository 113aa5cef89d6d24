"""`torchrelay run` whose workers are `tests.fake_trainer`s: all of it but torch. `python -m tests.fake_run <words>`."""

from __future__ import annotations

import os
from pathlib import Path

if "FAKE_BEGUN" in os.environ:
    Path(os.environ["FAKE_BEGUN"]).touch()

import dataclasses
import sys

import msgspec

from torchrelay.cli import local_run
from torchrelay.cli import main as command
from torchrelay.cli.run import Plan

follow = local_run.follow


def pretend(plan: Plan) -> int:
    """Follow the same plan with workers that need no torch."""
    preload = (os.environ.get("FAKE_PRELOAD", "torchrelay.wire.page"),)
    launch = msgspec.structs.replace(plan.launch, preload=preload, function="tests.fake_trainer:train")
    return follow(dataclasses.replace(plan, launch=launch))


if __name__ == "__main__":
    local_run.follow = pretend
    command.main(["run", *sys.argv[1:]])
