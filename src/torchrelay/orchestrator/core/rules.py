"""Rules: a journal is replayed by the rules that it was begun with, as long as its job goes on.

Other rules would make another state of the same events: what was promised to agents and operators would not hold.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from torchrelay.orchestrator.store.journal import JournalRefused, read_history, read_rules
from torchrelay.orchestrator.views.story import replay
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.model.state import Cluster
from torchrelay.protocol.rules.cluster import RULES_VERSION


def other_rules(path: Path) -> str:
    """Why the torchrelay that is installed may not go on with a journal; empty if it may. Reads only."""
    try:
        rules, writer = read_rules(path)
    except FileNotFoundError:
        return ""
    except JournalRefused as error:
        return str(error)
    return "" if rules == RULES_VERSION or has_ended(path) else refusal(path, rules, writer)


def has_ended(path: Path) -> bool:
    """Whether all jobs of a journal have ended, by the rules installed now too."""
    try:
        return all_ended(replay(read_history(path).entries))
    except (JournalRefused, AssertionError, LookupError, ValueError, TypeError, AttributeError):
        # Rules that do not fit may fail in any way: nothing of it may be used.
        return False


def all_ended(cluster: Cluster) -> bool:
    """Whether there is no job that goes on."""
    return all(job.phase is JobPhase.ENDED for job in cluster.jobs.values())


def refusal(path: Path, rules: int, writer: str) -> str:
    """What is in the way, and what to do."""
    return (
        f"{path} goes by rules {rules} (torchrelay {writer}), but torchrelay {version('torchrelay')}, which is "
        f"installed, has rules {RULES_VERSION}: let the job finish with the version that started it (install that "
        "again), or start it anew in another --run-dir"
    )
