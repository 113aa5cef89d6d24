"""`torchrelay freeze` and `unfreeze`: files that the orchestrator looks for, so that they work while it is away."""

from __future__ import annotations

import argparse
import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torchrelay.api.endpoint import FREEZE, LIFTED
from torchrelay.api.shown import Change
from torchrelay.cli.operate.changing import refuse_if_over, settle_change
from torchrelay.client.client import Away, Client, Denied, who_am_i
from torchrelay.client.runs import FOLDER, NotPossible, find_run
from torchrelay.terminal.show import Output, remark, show_json
from torchrelay.wire.files.owned import write_owned

SEEN_S = 5.0  # the orchestrator looks every half second
LOOK_S = 0.05


def freeze(given: argparse.Namespace) -> None:
    """Write the file, and wait until it is seen."""
    path = file_of(given)
    if not given.all:
        check(find_run(given.run_dir))
    reason = " ".join(given.reason.split())
    if heeded(path):
        plan = Change(verb="freeze", applied=False, changes=False, plan=(f"frozen already: {path} is there",))
    else:
        lines = (f"freeze {scope(given)}: nothing is moved, and faults end the job as without torchrelay", f"({path})")
        plan = Change(verb="freeze", applied=False, changes=True, plan=lines)

    def act() -> Change:
        try:
            write_owned(path, f"{reason}\n{who_am_i()}\n")
        except OSError as error:
            raise NotPossible(f"{path}: {error.strerror}; nothing was changed") from error
        return done(plan)

    carry_out(given, plan, act, path, wanted=True)


def unfreeze(given: argparse.Namespace) -> None:
    """Remove the file, and wait until that is seen."""
    path = file_of(given)
    if os.path.lexists(path):
        plan = Change(verb="unfreeze", applied=False, changes=True, plan=(f"unfreeze {scope(given)} ({path})",))
    else:
        plan = Change(verb="unfreeze", applied=False, changes=False, plan=(f"not frozen: there is no {path}",))

    def act() -> Change:
        with suppress(OSError):  # who it was is good to know, but not needed
            write_owned(path.with_name(LIFTED), f"{who_am_i()}\n")
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise NotPossible(f"{path}: {error.strerror}; nothing was changed") from error
        return done(plan)

    carry_out(given, plan, act, path, wanted=False)


def heeded(path: Path) -> bool:
    """Whether a file is there that freezes: neither a link nor a pipe, and not a stranger's."""
    try:
        found = path.lstat()
        return stat.S_ISREG(found.st_mode) and found.st_uid in (os.getuid(), 0, path.parent.stat().st_uid)
    except OSError:
        return False


def check(run_dir: Path) -> None:
    """Raises `NotPossible` if the run is over. An orchestrator that is only away heeds the file when it is back."""
    try:
        Client.of(run_dir).view_status()
    except (Away, Denied):
        refuse_if_over(run_dir)


def done(plan: Change) -> Change:
    return Change(verb=plan.verb, applied=True, changes=True, plan=plan.plan)


def file_of(given: argparse.Namespace) -> Path:
    """The file; with --all that of the folder of runs. Raises `NotPossible`."""
    if given.all and given.run_dir is None:
        if not FOLDER.is_dir():
            raise NotPossible(f"no folder ./{FOLDER} here: name a run with --run-dir, its folder is meant", 2)
        return FOLDER.absolute() / FREEZE
    run_dir = find_run(given.run_dir).absolute()
    return (run_dir.parent if given.all else run_dir) / FREEZE


def scope(given: argparse.Namespace) -> str:
    if given.all:
        return f"all runs in {file_of(given).parent}"
    return f"the run in {find_run(given.run_dir)}"


def carry_out(given: argparse.Namespace, plan: Change, act: Callable[[], Change], path: Path, *, wanted: bool) -> None:
    """The plan, the deed, and what the orchestrator makes of it."""
    found = settle_change(plan, act, yes=given.yes, dry_run=given.dry_run, output=given.output)
    if found.applied:
        remark(seen(given, path, wanted=wanted))
    if given.output is Output.JSON:
        print(show_json(found))


def seen(given: argparse.Namespace, path: Path, *, wanted: bool) -> str:
    """Wait until the orchestrator has seen the file; says so if it is away, or does not see it."""
    try:
        run_dir = find_run(given.run_dir)
    except NotPossible:
        return ""  # --all, before the first run
    until = time.monotonic() + SEEN_S
    while time.monotonic() < until:
        try:
            sources = {one.source for one in Client.of(run_dir).view_nodes().freezes}
        except (Away, Denied, ValueError) as error:
            return f"the orchestrator is away ({error}): it heeds the file when it is back"
        if (f"file {path}" in sources) == wanted:
            return f"still frozen by {', '.join(sorted(sources))}" if sources and not wanted else ""
        time.sleep(LOOK_S)
    return f"the orchestrator has not seen it within {SEEN_S:g} s: see {run_dir}/logs/orchestrator.log"
