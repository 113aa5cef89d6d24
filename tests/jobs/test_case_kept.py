"""What a script keeps between its steps, or goes on with inside them, is carried and put back, or refused by its name.

The fault comes long before it matters; nothing but these values tells that they are wrong.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed

pytestmark = pytest.mark.timeout(240)

BETWEEN = [
    "enum", "flag", "namedtuple", "frozen", "nonlocal", "defaultdict", "counter", "deque", "list", "function", "class",
    "global", "default", "contextvar", "environ", "namespace", "thread", "module", "slots",
    "late",
]  # fmt: skip


@pytest.mark.parametrize("mode", BETWEEN)
def test_a_replacement_goes_on_with_what_was_kept_between_steps(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, "kept-between", mode=mode, strike="grad:25:1")
    assert verdict.fate is Fate.EQUAL, verdict


INSIDE = [
    "counter", "defaultdict", "function", "module", "environ", "contextvar", "thread", "own-list", "own-dict",
    "descriptor",
]  # fmt: skip
FIRST = ["lazy", "lazy-class", "lazy-global", "lazy-environ", "begins", "grows", "fills"]  # in the step that is cut


@pytest.mark.parametrize("mode", INSIDE)
def test_a_step_that_is_made_again_does_not_count_twice(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, "kept-inside", mode=mode, strike="grad:6:1")
    assert verdict.fate is Fate.EQUAL, verdict


@pytest.mark.parametrize("mode", FIRST)
def test_nor_does_the_step_that_is_the_first_to_count(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, "kept-inside", mode=mode, strike="grad:6:1")
    assert verdict.fate is Fate.EQUAL, verdict


@pytest.mark.parametrize(
    ("mode", "where"),
    [("lazy", "after:6:1"), ("begins", "grad:7:1"), ("lazy", "update:6:1"), ("begins", "update:6:1")],
)
def test_what_has_moved_for_the_first_time_is_in_the_record_at_once(tmp_path: Path, mode: str, where: str) -> None:
    verdict = disturbed(tmp_path, "kept-inside", mode=mode, strike=where)
    assert verdict.fate is Fate.EQUAL, verdict


@pytest.mark.parametrize(("mode", "named"), [("iterator", "numbers"), ("cycle", "ring"), ("generator", "grown")])
def test_an_iterator_that_steps_go_on_with_is_refused_at_once(tmp_path: Path, mode: str, named: str) -> None:
    verdict = disturbed(tmp_path, "kept-inside", mode=mode)
    assert verdict.fate is Fate.REFUSED, verdict
    assert verdict.ran.code == 93, verdict
    assert f"{named} of __main__ is an iterator that is gone on with" in verdict.reason, verdict


@pytest.mark.parametrize(
    ("mode", "code", "words"),
    [
        ("large", 91, "center of __main__.value changes in the course of the training, and is too large"),
        ("cached", 93, "result 0 of source of __main__ has changed in the course of the training"),
    ],
)
def test_what_cannot_be_carried_is_refused_at_the_fault(tmp_path: Path, mode: str, code: int, words: str) -> None:
    verdict = disturbed(tmp_path, "kept-inside", mode=mode, strike="grad:6:1")
    assert verdict.fate is Fate.REFUSED, verdict
    assert verdict.ran.code == code, verdict
    assert words in verdict.reason, verdict


def test_what_each_example_has_cost_weighs_the_next_epoch(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "hard-examples", strike="grad:25:1")
    assert verdict.fate is Fate.EQUAL, verdict


ELSEWHERE = [
    "closure", "held", "nested", "keyword", "users", "chain", "raw", "numbers", "made", "settings", "cached",
    "closure-late", "nested-late", "settings-late", "tensor-late", "drawn-late",
]  # fmt: skip


@pytest.mark.parametrize("mode", ELSEWHERE)
def test_it_is_found_in_places_that_are_hard_to_see(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, "kept-elsewhere", mode=mode, strike="grad:16:1")
    assert verdict.fate is Fate.EQUAL, verdict
