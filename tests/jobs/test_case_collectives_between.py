"""A collective between two steps, in no section: a peaceful run says it once, with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import run_case

pytestmark = pytest.mark.timeout(200)


def test_it_is_said_before_any_fault(tmp_path: Path) -> None:
    ran = run_case(tmp_path, "uneven", mode="barrier")
    assert ran.code == 0, ran.output
    (said,) = [line for line in ran.output.splitlines() if "between two calls" in line]
    assert "train.py:" in said
    assert "calls barrier" in said
