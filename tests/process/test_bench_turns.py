"""The bench `turns`: when its jobs wait, and the figures that it makes of what they have written down."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from compare_schedule import Fault, What
from tests.support.bench_turns import PLAN, job, jobs
from turns_figures import flat_of
from turns_report import words_of, write


def test_the_report_tells_what_is_held_and_what_not(tmp_path: Path) -> None:
    held = job("torchrelay-spares", [5.1, 6.0, 5.1], struck=(150,))
    missed = job("torchrelay-shrink", [5.4, 9.0, 5.4], struck=(150,))
    all_of_them = [*jobs(spans=[5.0] * 3)[:2], held, missed]
    schedule = (Fault(150, What.KILL, 2),)
    figures = flat_of(all_of_them, PLAN)
    page = words_of(all_of_them, PLAN, schedule, figures, {"cores": 2}, "--seed 7", "gpt")
    (first, second) = [line for line in page.splitlines() if line.startswith("| torchrelay")]
    assert "(held)" in first
    assert "(**not held**)" in second
    assert "| 3.02 |" in second, "what a step takes longer, in ms"
    assert 'make bench NAME=turns ARGS="--seed 7"' in page
    write(tmp_path, all_of_them, PLAN, schedule, figures, {"cores": 2}, "--seed 7", "gpt")
    assert (tmp_path / "README.md").read_text() == page
    assert (tmp_path / "turns.png").stat().st_size > 10_000
    took = msgspec.json.decode((tmp_path / "results.json").read_bytes())["took_s"]
    assert took["torchrelay-shrink"] == pytest.approx([5.4, 9.0, 5.4], abs=1e-5)
