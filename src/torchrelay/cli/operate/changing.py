"""Changing: what all verbs that change something have in common: the plan first, then a question, then the deed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchrelay.api.shown import Change
from torchrelay.client.client import Away, Client
from torchrelay.client.runs import Far, NotPossible, find_run, from_afar
from torchrelay.terminal.show import Output, show_json


def ask_and_do(
    run_dir: Path | Far | None, path: str, body: dict[str, Any], *, yes: bool, dry_run: bool, output: Output
) -> Change:
    """Let the orchestrator plan, ask, and let it carry the plan out. Raises `NotPossible`, `Denied`."""
    client = reach_orchestrator(run_dir)
    plan = client.change(path, body, dry_run=True)
    done = settle_change(
        plan, lambda: client.change(path, body, dry_run=False), yes=yes, dry_run=dry_run, output=output
    )
    if output is Output.JSON:
        print(show_json(done))
    return done


def reach_orchestrator(run_dir: Path | Far | None) -> Client:
    """The orchestrator of a run. Raises `NotPossible` if it is away: only it can change anything."""
    if isinstance(run_dir, Far):
        return from_afar(run_dir)[0]
    found = find_run(run_dir)
    try:
        client = Client.of(found)
        client.view_status()
    except Away as error:
        refuse_if_over(found)
        remedy = "`torchrelay run` starts it again, at once if it has ended, in 20 s if it answers nobody: try again"
        raise NotPossible(f"nothing was changed: {error}; {remedy}") from error
    return client


def refuse_if_over(run_dir: Path) -> None:
    """Raises `NotPossible` if the journal says that the run has ended: nobody will ever do anything there."""
    from torchrelay.client.chronicle import Chronicle  # replaying needs the whole protocol: only now

    chronicle = Chronicle.of(run_dir)
    if chronicle.over:
        raise NotPossible(f"nothing can be changed: {chronicle.remark}", 2)


def settle_change(plan: Change, act: Callable[[], Change], *, yes: bool, dry_run: bool, output: Output) -> Change:
    """Say the plan; carry it out unless that is not wanted, or nothing would change."""
    aside = output is Output.JSON  # stdout is for the answer
    say(plan_text(plan), aside=aside)
    if dry_run or not plan.changes:
        return plan
    if not confirmed(yes):
        raise NotPossible("nothing was changed")
    try:
        done = act()
    except Away as error:
        raise NotPossible(f"it is not known whether this was heard: {error}; look with `torchrelay audit`") from error
    say(done_text(done), aside=aside)
    return done


def say(text: str, *, aside: bool) -> None:
    if text:
        print(text, file=sys.stderr if aside else sys.stdout)


def plan_text(plan: Change) -> str:
    """The plan in words; what it is waiting for comes last."""
    lines = [*plan.plan]
    if plan.waits:
        lines.append(f"not at once: it {plan.waits}")
    elif plan.move and plan.changes:
        lines.append(f"this is {plan.move}")
    return "\n".join(lines)


def done_text(done: Change) -> str:
    """What has become of it, and where to look."""
    if not done.applied:
        return ""
    named = f" as {done.move}" if done.move else ""
    waits = f"; it {done.waits}" if done.waits else ""
    look = f"; `torchrelay explain {done.explain}` tells how it goes on" if done.explain else ""
    return f"done{named}{waits}{look}"


def confirmed(yes: bool) -> bool:
    """Ask, if there is somebody who can answer."""
    if yes or not sys.stdin.isatty():
        return True
    print("go on? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def place_in(text: str) -> dict[str, Any]:
    """NODE[/SLOT] as the API takes it. Raises `NotPossible`."""
    node, slash, slot = text.partition("/")
    if not node or (slash and not slot.isdecimal()):
        raise NotPossible(f"{text!r} is no place: give NODE, or NODE/SLOT with the slot's number", 2)
    return {"node": node, "slot": int(slot)} if slash else {"node": node}
