"""`torchrelay restart-services`: orchestrator and agents restart with the installed code; training goes on.

`torchrelay run` keeps the processes: it is asked through a file that the orchestrator writes, and does it (`renewal`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torchrelay.api.endpoint import JOURNAL
from torchrelay.api.shown import Change, Status
from torchrelay.cli.operate.changing import reach_orchestrator, settle_change
from torchrelay.client.client import Away, Client, Denied
from torchrelay.client.runs import NotPossible, find_run
from torchrelay.terminal.show import Output, remark, show_json

DEADLINE_S = 60.0  # for the orchestrator, and for each agent
LOOK_S = 0.1


def restart(given: argparse.Namespace) -> None:
    """Ask for it, and wait until what was restarted is back. Raises `NotPossible`, `Denied`."""
    both = not (given.orchestrator or given.agents)
    body = {
        "orchestrator": given.orchestrator or both, "agents": given.agents or both, "force": given.force,
    }  # fmt: skip
    client = reach_orchestrator(given.run_dir)
    if body["orchestrator"]:
        check_rules(find_run(given.run_dir))
    if body["agents"] and client.url.startswith("https:"):
        why = "agents on other machines are not restarted yet: --orchestrator restarts what is here"
        raise NotPossible(f"nothing was restarted: {why}", 2)
    before, agents = client.view_status(), incarnations(client)
    plan = client.change("/v1/restart", body, dry_run=True)

    def act() -> Change:
        done = client.change("/v1/restart", body, dry_run=False)
        run_dir = find_run(given.run_dir)
        if body["orchestrator"]:
            wait("the orchestrator", run_dir, lambda now: now.view_status().pid != before.pid)
        for node, incarnation in sorted(agents.items()) if body["agents"] else ():
            wait(f"the agent of {node}", run_dir, partial(renewed, node=node, before=incarnation))
        after = Client.of(run_dir).view_status()
        remark(f"training is {phases(after)}; lease {after.lease}")
        return done

    found = settle_change(plan, act, yes=given.yes, dry_run=given.dry_run, output=given.output)
    if given.output is Output.JSON:
        print(show_json(found))


def check_rules(run_dir: Path) -> None:
    """Raises `NotPossible` if what is installed now could not go on with the job: the next orchestrator would end."""
    from torchrelay.orchestrator.core.rules import other_rules  # replaying needs the whole protocol: only now

    wrong = other_rules(run_dir / JOURNAL)
    if wrong:
        raise NotPossible(f"nothing was restarted, the job goes on as before: {wrong}", 2)


def phases(status: Status) -> str:
    return ", ".join(f"{job.phase} at step {job.step}" for job in status.jobs) or "not begun"


def incarnations(client: Client) -> dict[str, str]:
    """The agents that are there now."""
    return {str(node.node): node.incarnation for node in client.view_nodes().nodes if node.alive}


def renewed(client: Client, node: str, before: str) -> bool:
    return incarnations(client).get(node, before) != before


def wait(what: str, run_dir: Path, fact: Callable[[Client], bool]) -> None:
    """Wait until something is back. Raises `NotPossible` if it does not come."""
    begun = time.monotonic()
    while time.monotonic() - begun < DEADLINE_S:
        try:
            if fact(Client.of(run_dir)):
                remark(f"{what} is back after {time.monotonic() - begun:.1f} s")
                return
        except (Away, Denied, ValueError):
            pass  # it is just being started
        time.sleep(LOOK_S)
    raise NotPossible(f"{what} has not come back within {DEADLINE_S:g} s: see {run_dir}/logs")
