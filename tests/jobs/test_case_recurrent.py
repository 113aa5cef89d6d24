"""What one step keeps for the next is carried, or its use is refused; what nobody reads is no matter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed, migrate

pytestmark = pytest.mark.timeout(240)

CARRIED = [
    "trainer-pair-small", "module-pair-small", "global-typed-small", "module-frozen-small",
    "trainer-pairs-small", "module-in_list-small", "trainer-in_dict-small", "module-of_lists-small",
    "trainer-arrays-small", "module-in_plain-small", "trainer-record-small", "module-plain-small",
    "trainer-dict-small", "global-tuple-small", "module-deque-small", "trainer-itself-small-first-put",
    "trainer-attributes-small-first-put", "module-in_attributes-small-first",
]  # fmt: skip
REFUSED = [
    "module-pair-large", "trainer-frozen-large", "module-tuple-large", "module-list-large", "module-dict-large",
    "module-plain-large", "module-record-large", "trainer-attributes-small", "trainer-itself-large-put",
    "trainer-attributes-large-first-put", "module-row-small", "module-own-small", "trainer-space-small",
    "module-slots-small", "module-user-small", "module-default-large", "module-in_tuples-small",
    "global-attributes-small", "trainer-ordered-large-put", "trainer-dict-large-first-put",
]  # fmt: skip
UNREAD = [
    "unread-tuple-large", "unread-pair-large", "unread-plain-large", "unread-attributes-large",
    "unread-row-small",
]  # fmt: skip
SHOWN = [
    "shown-tuple-small", "shown-dict-small", "shown-pair-small", "shown-plain-small", "shown-in_dict-small",
]  # fmt: skip


@pytest.mark.parametrize("mode", [*CARRIED, *UNREAD])
def test_it_is_carried_or_written_before_it_is_read(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, "recurrent", mode=mode, strike="grad:20:1")
    assert verdict.fate is Fate.EQUAL, verdict


@pytest.mark.parametrize("mode", REFUSED)
def test_what_is_not_carried_is_refused_when_it_is_read(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, "recurrent", mode=mode, strike="grad:20:1")
    assert verdict.fate is Fate.REFUSED, verdict
    assert "kept" in verdict.reason, verdict


@pytest.mark.parametrize("mode", SHOWN)
def test_what_a_step_leaves_for_people_is_there(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, "recurrent", mode=mode, strike="after:20:1")
    assert verdict.fate is Fate.EQUAL, verdict


LATE = ["trainer-tuple-small-late", "trainer-dict-small-late", "trainer-pair-small-late",
        "global-frozen-small-late", "shown-tuple-small-late", "trainer-tuple-large-late"]  # fmt: skip
ALIKE = ["unread-tuple-small-late", "counted-tuple-small-late"]  # a count of steps is kept there, too


@pytest.mark.parametrize("strike", ["upd", "put"])
@pytest.mark.parametrize("mode", LATE)
def test_what_an_update_has_left_is_not_taken_from_another_rank(tmp_path: Path, mode: str, strike: str) -> None:
    verdict = disturbed(tmp_path, "recurrent", mode=mode, strike=f"{strike}:20:1")
    assert verdict.fate is Fate.REFUSED, verdict
    assert "kept" in verdict.reason, verdict


@pytest.mark.parametrize("mode", ALIKE)
def test_what_it_makes_alike_on_all_ranks_is(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, "recurrent", mode=mode, strike="upd:20:1,put:22:0")
    assert verdict.fate is Fate.EQUAL, verdict


def test_and_after_a_planned_move(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "recurrent", mode="shown-dict-small", drive=migrate(1))
    assert verdict.fate is Fate.EQUAL, verdict
    assert verdict.ran.resolutions == ("clean",), verdict
