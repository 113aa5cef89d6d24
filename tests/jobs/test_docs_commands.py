"""The commands that the pages for operators show, run as they stand there, in their order, on a job that trains."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.support.docs_commands import (
    Operator,
    computed,
    folder,  # noqa: F401  a fixture
    operator,  # noqa: F401  a fixture
    shown,
)
from tests.support.jobs import torchrelay

pytestmark = pytest.mark.timeout(300)


def test_the_first_kill_goes_as_its_page_says(operator: Operator) -> None:
    run, *commands = shown("docs/first-kill.md")
    assert (run[0], [words[0] for words in commands]) == ("run", ["ranks", "chaos", "incidents", "explain"])
    operator.start(run)
    operator.until(step=5, warm=1)
    told = [operator.type(words) for words in commands]
    assert "outcome" in told[1]
    assert "clean" in told[2]
    assert all(phase in told[3] for phase in ("detect", "restore", "resume"))


QUICK = {"simulate": ["--runs", "1", "--days", "2"]}  # how long it computes is the reader's choice


@pytest.mark.parametrize("words", computed(), ids=shlex.join)
def test_what_is_computed_is_computed_as_its_page_says(words: list[str], folder: Path) -> None:
    if words[0] == "report" and "--ledger" not in words:
        words = [*words, "--ledger", "torchrelay-runs/train-7/ledger.jsonl"]  # else it asks a run
    words = [found for word in words for found in (sorted(map(str, folder.glob(word))) if "*" in word else [word])]
    done = torchrelay(*words, *QUICK.get(words[0], []), cwd=folder, timeout_s=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
