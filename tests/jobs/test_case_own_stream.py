"""Data of a stream of the script's own that a step reads from a variable: a replacement would begin the stream anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed


@pytest.mark.parametrize("mode", ["tensor", "tuple", "list", "dict", "argument", "buffer", "object"])
def test_a_replacement_with_other_data_is_refused(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, "own-stream", mode=mode, strike="grad:30:1")
    assert verdict.fate is Fate.REFUSED, verdict
    named = {"argument": "argument 'item'", "object": "'held.batch'"}.get(mode, "'batch', which")
    assert named in verdict.reason or "is an iterator that is gone on with" in verdict.reason, verdict
