"""The network protocol, in C: its stories, simulated worlds, every state of a small one, and hostile frames."""

from __future__ import annotations

from tests.support.netpath_protocol import (
    FAST,
    SANITIZED,
    Built,
    built,  # noqa: F401  a fixture
    holds,
)


def test_many_worlds_hold(built: Built) -> None:
    said = holds(built("world", FAST), "400", "20000")
    for what in ("chunks sent again 0,", "come twice 0,", "ends that failed 0,", "chunks cut short 0,"):
        assert what not in said


def test_a_small_world_holds_with_three_faults_and_steps_out_of_turn(built: Built) -> None:
    exhaustive = built("exhaustive", FAST)
    holds(exhaustive, "3", "0")
    holds(exhaustive, "2", "1")


def test_many_hostile_frames_touch_nothing(built: Built) -> None:
    holds(built("frames", SANITIZED), "1000000", "30")
