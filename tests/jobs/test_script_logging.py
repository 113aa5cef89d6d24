"""What a script logs is its own affair: under torchrelay it looks as under plain Python."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import SCRIPTS, run_job

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("words", [["basic"], []], ids=["configured", "not"])
def test_logging_and_warnings_are_those_of_plain_python(tmp_path: Path, words: list[str]) -> None:
    script = str(SCRIPTS / "logs.py")
    plain = subprocess.run([sys.executable, script, *words], capture_output=True, text=True, timeout=60, check=True)
    job = run_job(tmp_path / "run", [script, *words])
    assert job.code == 0, job.output
    ranks = [line.removeprefix("[0] ") for line in job.output.splitlines() if line.startswith("[0] ")]
    said = [line for line in ranks if not line.startswith("torchrelay: this script never called protect()")]
    assert sorted(said) == sorted((plain.stdout + plain.stderr).splitlines()), job.output
    assert not re.search(r"torchrelay: (a warning|an info|another library|warned)", job.output)
