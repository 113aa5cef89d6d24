"""What decides is another one from some step on: a function, a class, a module, a value; wherever it is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed, migrate

CARRIED = "attribute+method+global+variable+entry+row+partial+builtin+class+strategy+module+activation"


def test_what_is_found_by_its_name_or_made_of_values_goes_on(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "bound-anew", mode=CARRIED, strike="grad:20:1,grad:31:0")
    assert verdict.fate is Fate.EQUAL, verdict


@pytest.mark.parametrize("mode", ["lambda", "hook"])
def test_what_has_no_name_is_refused_at_a_fault(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, "bound-anew", mode=mode, strike="grad:20:1")
    assert verdict.fate is Fate.REFUSED, verdict
    assert "is another function, class or module than at the start" in verdict.reason, verdict


@pytest.mark.parametrize(
    ("mode", "strike"), [("between", "after:20:1,grad:30:0"), ("within", "grad:14:1")], ids=["between", "within"]
)
def test_values_that_change_but_once_long_after_the_start_are_told(tmp_path: Path, mode: str, strike: str) -> None:
    verdict = disturbed(tmp_path, "changed-once", mode=mode, strike=strike)
    assert verdict.fate is Fate.EQUAL, verdict


@pytest.mark.parametrize("mode", ["inside", "between"])
def test_what_a_module_keeps_that_only_another_one_imports(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, "packages", mode=mode, strike="grad:25:1")
    assert verdict.fate is Fate.EQUAL, verdict


def test_what_classes_keep_and_dicts_by_all_keys_and_objects_of_torchs(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "only-ones", strike="grad:25:1,grad:30:0")
    assert verdict.fate is Fate.EQUAL, verdict


def test_containers_of_layers_locks_and_streams_are_left_alone_under_hsdp(tmp_path: Path) -> None:
    flags = ("--nproc-per-node", "4", "--spares", "1")
    verdict = disturbed(tmp_path, "sharded-own", strike="grad:2:1,grad:14:2", flags=flags)
    assert verdict.fate is Fate.EQUAL, verdict


@pytest.mark.parametrize(("strike", "fate"), [("grad:2:1", Fate.EQUAL), ("grad:5:1", Fate.REFUSED)])
def test_steps_that_raise_after_ranks_have_talked(tmp_path: Path, strike: str, fate: Fate) -> None:
    """Before the second place steps have raised since the last one was committed."""
    verdict = disturbed(tmp_path, "raises-on", strike=strike)
    assert verdict.fate is fate, verdict
    if fate is Fate.REFUSED:
        assert "a step raised Skipped, the script went on without it" in verdict.reason, verdict


def test_on_the_target_of_a_move(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "bound-anew", mode=CARRIED, drive=migrate(1))
    assert verdict.fate is Fate.EQUAL, verdict


@pytest.mark.parametrize("mode", [*CARRIED.split("+"), "added", "within"])
def test_each_by_itself(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, "bound-anew", mode=mode, strike="grad:20:1")
    assert verdict.fate is Fate.EQUAL, verdict
