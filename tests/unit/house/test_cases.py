"""The runner of case scripts: what it says of a run beside an undisturbed one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.cases.running import Fate, Ran, judge, read_lines

CALM = Ran(0, "", {(0, "1", "loss"): '"0x1p0"', (0, "end", "model"): '"ab"'}, frozenset(), Path())
HALF = {(0, "1", "loss"): '"0x1p0"'}
WRONG = {(0, "1", "loss"): '"0x1p1"'}


@pytest.mark.parametrize(
    ("ran", "fate"),
    [
        (CALM, Fate.EQUAL),
        (replace(CALM, resolutions=("clean",)), Fate.EQUAL),
        (replace(CALM, resolutions=("clean", "fell back")), Fate.FELL_BACK),
        (replace(CALM, lines=CALM.lines | WRONG), Fate.SILENT),
        (replace(CALM, lines=HALF), Fate.SILENT),
        (replace(CALM, lines=CALM.lines | {(0, "2", "loss"): "1"}), Fate.SILENT),
        (replace(CALM, code=93, lines=HALF), Fate.REFUSED),
        (replace(CALM, code=91, lines={}), Fate.REFUSED),
        (replace(CALM, code=91, lines=WRONG), Fate.LATE),
        (replace(CALM, code=1, lines=HALF), Fate.FAILED),
        (replace(CALM, code=None, lines=HALF), Fate.HANG),
    ],
)  # fmt: skip
def test_what_became_of_a_run(ran: Ran, fate: Fate) -> None:
    assert judge(ran, CALM).fate is fate


def test_a_run_that_is_refused_undisturbed_is_refused() -> None:
    refused = replace(CALM, code=93, lines=HALF)
    assert judge(refused, refused).fate is Fate.REFUSED


def test_the_last_line_of_a_step_counts_and_half_a_line_does_not(tmp_path: Path) -> None:
    lines = ['{"step": 1, "loss": 1}', '{"step": 1, "loss": 2}', '{"end": true, "model": "ab"}', '{"step": 2, "lo']
    (tmp_path / "rank-1.jsonl").write_text("\n".join(lines))
    assert read_lines(tmp_path) == {(1, "1", "loss"): "2", (1, "end", "model"): '"ab"'}
