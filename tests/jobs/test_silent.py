"""Scripts that break a rule on purpose: some cells of `python -m tests.matrix --silent`, and what that says of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.silent import BAD, run_cell

JOB = [pytest.mark.slow, pytest.mark.jobs, pytest.mark.timeout(240)]
QUICK = [
    ("unseeded", "kill"), ("edited-late-module", "move"), ("sampler-numpy", "drain"), ("tokens-by-time", "kill"),
    ("own-tokens-by-time", "kill"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "act"), [pytest.param(*cell, marks=JOB) for cell in QUICK])
def test_nothing_wrong_comes_of_it_silently(tmp_path: Path, rule: str, act: str) -> None:
    verdict = run_cell(tmp_path, rule, act)
    assert verdict.fate not in BAD, verdict
