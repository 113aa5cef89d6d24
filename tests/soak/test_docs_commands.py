"""The commands that the pages for operators show, run as they stand there, in their order, on a job that trains."""

from __future__ import annotations

import shlex

import pytest

from tests.support.docs_commands import (
    Operator,
    operator,  # noqa: F401  a fixture
    shown,
)

pytestmark = pytest.mark.timeout(300)


def test_a_job_is_operated_as_its_page_says(operator: Operator) -> None:
    """First the move, while its ranks are where it takes them from; then faults: the page speaks of incident 3."""
    operator.start(
        [
            "run",
            "--nodes",
            "2",
            "--nproc-per-node",
            "2",
            "--spares",
            "2",
            "--spare-nodes",
            "1",
            "examples/train_gpt.py",
            "--epochs",
            "1000",
        ]
    )
    operator.until(step=5, warm=4)
    commands = shown("docs/operate.md") + shown("docs/read-an-incident.md")
    faults = [words for words in commands if words[0] == "chaos"]
    assert len(faults) >= 3
    for words in [*(words for words in commands if words[0] == "migrate"), *faults]:
        operator.type(words)
    ours = [words for words in commands if words[0] not in ("chaos", "migrate", "run", "net")]
    told = {shlex.join(words): operator.type(words) for words in ours}
    assert len(told) >= 20
    assert "this is M-" in told["drain node-1 --reason 'new disks'"]
    assert told["explain I-3"].startswith("I-3")
