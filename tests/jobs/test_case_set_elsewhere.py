"""What steps set on things that are not the script's goes to a replacement, or is refused; it is set once in all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed, migrate

pytestmark = pytest.mark.timeout(240)

CARRIED = [
    "dataset", "subset", "concat", "sampler", "batches", "inline", "rows", "order", "logger", "thread", "torch",
    "numpy", "sys", "class", "function", "named", "partial", "swapped", "own", "tensors", "indices", "argv",
    "ctypes", "ctype", "view", "shared", "row", "dtype", "denormals", "errors", "digits", "precision", "precisions",
    "attention",
]  # fmt: skip


@pytest.mark.parametrize("mode", CARRIED)
def test_it_is_carried(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, "set-elsewhere", mode=mode, strike="grad:12:1,after:20:0")
    assert verdict.fate is Fate.EQUAL, verdict


@pytest.mark.parametrize("mode", ["sampler", "class", "tensors"])
def test_and_on_the_target_of_a_move(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, "set-elsewhere", mode=mode, drive=migrate(1, at=12))
    assert verdict.fate is Fate.EQUAL, verdict


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("weak", "is an object of a library"), ("seeds", "is an object of a library"),
        ("block", "is an object of a library"),
        ("hook", "is another function"), ("hooks", "is another function"),
    ],
)  # fmt: skip
def test_or_refused(tmp_path: Path, mode: str, why: str) -> None:
    verdict = disturbed(tmp_path, "set-elsewhere", mode=mode, strike="grad:12:1")
    assert verdict.fate is Fate.REFUSED, verdict
    assert why in verdict.reason, verdict
