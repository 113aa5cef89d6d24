"""What tests of faults share."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.jobs import SCRIPTS


def faulty(*words: str) -> list[str]:
    return [str(SCRIPTS / "faulty.py"), *words]


def planned(work: Path, *faults: dict[str, object]) -> list[str]:
    """The script's options for a plan."""
    (work / "marks").mkdir()
    (work / "plan.json").write_text(json.dumps(faults))
    return ["--plan", str(work / "plan.json"), "--marks", str(work / "marks")]
