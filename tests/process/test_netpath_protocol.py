"""The network protocol, in C: its stories, simulated worlds, every state of a small one, and hostile frames."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests import netpath_mutants
from tests.support.netpath_changes import CHANGES, EQUIVALENT
from tests.support.netpath_protocol import (
    FAST,
    RULES_AND_SEEDS,
    SANITIZED,
    Built,
    built,  # noqa: F401  a fixture
    holds,
    rules,
    run,
)


def test_worlds_hold(built: Built) -> None:
    said = holds(built("world", SANITIZED), "0", "400")
    assert "paths lost by silence 0," not in said
    assert "bits turned 0," not in said


def test_a_small_world_holds_in_every_state(built: Built) -> None:
    holds(built("exhaustive", SANITIZED), "1", "1")


def test_hostile_frames_touch_nothing(built: Built) -> None:
    holds(built("frames", SANITIZED), "1", "1.5")


@pytest.mark.parametrize("checked", [False, True])
def test_a_listener_under_attack_goes_on_serving(built: Built, monkeypatch: pytest.MonkeyPatch, checked: bool) -> None:
    monkeypatch.setenv("TORCHRELAY_NET_CRC", str(int(checked)))
    said = holds(built("listener", SANITIZED), "1", "6")
    assert "each right" in said


@pytest.mark.parametrize("rule", RULES_AND_SEEDS)
def test_a_rule_of_the_engine_is_needed(built: Built, rule: str) -> None:
    world, seed = built("world", FAST), str(RULES_AND_SEEDS[rule])
    holds(world, seed, "1")
    done = run(world, "--without", rules()[rule], seed, "1")
    assert done.returncode == 1, f"without {rule} nothing goes wrong in seed {seed}: find another, world --without"


def test_some_mutants_die(tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler (cc): no mutant can be made")
    netpath_mutants.compile_parts(tmp_path)
    for change in [change for change in CHANGES if change.name not in EQUIVALENT][::40]:
        assert netpath_mutants.meet(change, tmp_path).killer, change.name
