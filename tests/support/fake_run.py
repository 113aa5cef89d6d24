"""`torchrelay run` whose workers are `tests.support.fake_trainer`s: all of it but torch.

`python -m tests.support.fake_run <words>`.
"""

from __future__ import annotations

import os
from pathlib import Path

if "FAKE_BEGUN" in os.environ:
    Path(os.environ["FAKE_BEGUN"]).touch()

import dataclasses
import sys
from contextlib import suppress

from torchrelay.cli.launch.unprepared import ends_at_once

with ends_at_once():  # as the command itself has it
    import msgspec

    from torchrelay.cli import main as command
    from torchrelay.launcher import local_run
    from torchrelay.launcher.plan import Plan
    from torchrelay.wire.files.page import no_room

follow = local_run.follow


def fill(folder: Path, pages: int) -> str:
    """Whatever room there is in this folder is taken."""
    with (folder / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    return no_room(folder, 0 * pages)


def pretend(plan: Plan) -> int:
    """Follow the same plan with workers that need no torch."""
    if "FAKE_FILL" in os.environ:  # between the look at what room there is, and the start of the workers
        vars(local_run)["no_room"] = fill
    preload = (os.environ.get("FAKE_PRELOAD", "torchrelay.wire.files.page"),)
    launch = msgspec.structs.replace(plan.launch, preload=preload, function="tests.support.fake_trainer:train")
    return follow(dataclasses.replace(plan, launch=launch))


if __name__ == "__main__":
    local_run.follow = pretend
    command.main(["run", *sys.argv[1:]])
