"""The soak of mixed incidents: what is dealt, what is counted, and a short one of real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_short_soak_is_clean_and_bit_equal(tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "bench" / "guarantee.py"), "--incidents", "4", "--layout", "ddp"]
    words += ["--target", "0.4", "--out", str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    figures = json.loads(done.stdout.splitlines()[-1])["figures"]
    assert figures["eligible"] >= 4
    assert figures["clean"] == figures["eligible"]
    assert (figures["bit_equal"], figures["samples_once"], figures["violations"], figures["steps_lost"]) == (1, 1, 0, 0)
    assert sum(counted for counted, _ in figures["kinds"].values()) == figures["eligible"]
    (ledger,) = (tmp_path / "out").glob("*.jsonl")
    assert len(ledger.read_text().splitlines()) == figures["incidents"]
