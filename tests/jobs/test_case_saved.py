"""With save() and load() a replacement reads between two steps what its predecessor read there, or is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed, migrate

pytestmark = pytest.mark.timeout(240)

CASE = "saved"


@pytest.mark.parametrize(
    ("mode", "strike"),
    [
        ("schedule", "grad:25:1"), ("path", "grad:25:1"), ("norm", "grad:25:1"), ("norm", "grad:25:0"),
        ("counter", "grad:25:1"), ("random", "grad:25:1"),
    ],
)  # fmt: skip
def test_it_is_as_undisturbed(tmp_path: Path, mode: str, strike: str) -> None:
    verdict = disturbed(tmp_path, CASE, mode=mode, strike=strike)
    assert verdict.fate is Fate.EQUAL, verdict


def test_and_on_the_target_of_a_move(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, CASE, mode="schedule", drive=migrate(1))
    assert verdict.fate is Fate.EQUAL, verdict


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("mean", "save()['mean'] changes between two calls"),
        ("own", "ranks that count as replicas (of the shard all) save other values: save()['own']"),
    ],
    ids=["mean", "own"],
)
def test_what_nobody_can_tell_is_refused(tmp_path: Path, mode: str, words: str) -> None:
    verdict = disturbed(tmp_path, CASE, mode=mode, strike="grad:25:1")
    assert verdict.fate in (Fate.REFUSED, Fate.LATE), verdict
    assert words in verdict.reason, verdict
