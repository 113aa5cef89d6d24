"""What changes in objects of libraries is not carried: it is seen, said, and refused when a rank is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed, migrate

pytestmark = pytest.mark.timeout(240)

REFUSED = [
    "sorted-step-grad", "graph-between-after", "queue-local-grad", "normal-global-grad", "masked-step-after",
    "filed-step-grad", "polynomial-local-after", "bytes-between-grad", "message-global-after", "context-step-grad",
    "settings-step-grad", "sorted-local-after", "normal-between-grad",
]  # fmt: skip


@pytest.mark.parametrize("mode", REFUSED)
def test_a_fault_is_refused_by_the_name_of_the_object(tmp_path: Path, mode: str) -> None:
    *words, strike = mode.split("-")
    verdict = disturbed(tmp_path, "of-libraries", mode="-".join(words), strike=f"{strike}:20:1")
    assert verdict.fate is Fate.REFUSED, verdict
    assert "is an object of a library, and changes" in verdict.reason, verdict
    early = verdict.ran.output.split("step 10 ")[0]
    assert "A fault ends the job from now on" in early, "it is said before there is one"


@pytest.mark.parametrize("mode", ["progress-step", "progress-local", "once-step"])
def test_what_is_for_people_and_what_makes_itself_ready_is_no_matter(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, "of-libraries", mode=mode, strike="grad:20:1")
    assert verdict.fate is Fate.EQUAL, verdict


@pytest.mark.parametrize(
    ("mode", "strike"),
    [
        ("fitted-step", "grad:20:1"), ("third-global", "after:20:1"), ("third-local", "grad:20:1"),
        ("fitted-between", "grad:20:1"), ("late-step", "grad:20:1"), ("late-local", "after:17:1"),
        ("third-step", "grad:3:0"), ("late-between", "after:18:1"),
    ],
)  # fmt: skip
def test_what_changed_but_once_is_not_taken_for_ready(tmp_path: Path, mode: str, strike: str) -> None:
    verdict = disturbed(tmp_path, "of-libraries", mode=mode, strike=strike)
    assert verdict.fate is Fate.REFUSED, verdict


def test_a_move_is_called_off(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "of-libraries", mode="graph-step", drive=migrate(1))
    assert verdict.fate is Fate.EQUAL, verdict
    assert set(verdict.ran.resolutions) == {"called off"}, verdict
