"""The seeded world of successions: schedules without a violation, everything reached, and a judge that bites."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import fields, replace
from typing import Any

import pytest
from msgspec import structs

from torchrelay.protocol.succession import candidate, copying, head, voter
from torchrelay.simulation.succession import __main__ as command
from torchrelay.simulation.succession.__main__ import ENOUGH, missing
from torchrelay.simulation.succession.words import DUTIES, Duties
from torchrelay.simulation.succession.world import Result, run_seed

STORY = (
    "from torchrelay.simulation.succession.world import run_seed\n"
    "print([run_seed(seed, story=True).story for seed in range(20)])"
)


def first_violation(seeds: int, duties: Duties = DUTIES) -> str:
    """What the first seed breaks that breaks something; empty if none does."""
    found = (run_seed(seed, duties=duties).violation for seed in range(seeds))
    return next((violation for violation in found if violation), "")


def test_some_schedules_hold_everything() -> None:
    assert first_violation(300) == ""


def test_many_schedules_hold_everything_and_reach_everything() -> None:
    reached: Counter[str] = Counter()
    for seed in range(ENOUGH):
        result = run_seed(seed)
        assert not result.violation, f"python -m torchrelay.simulation.succession --seed {seed} --story"
        reached.update(result.coverage)
    assert missing(reached, ENOUGH) == []


def test_a_seed_tells_the_same_story_in_each_process() -> None:
    stories = [
        subprocess.run(
            (sys.executable, "-c", STORY),
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert stories[0] == stories[1]
    assert "acts under lease" in stories[0]


@pytest.mark.parametrize("duty", [field.name for field in fields(DUTIES)])
def test_each_duty_of_those_who_use_it_is_needed(duty: str) -> None:
    assert first_violation(4_000, replace(DUTIES, **{duty: False}))


def test_it_is_noticed_when_nobody_waits_for_heirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "let_leave", lambda known, _: structs.replace(known, left=known.written))
    assert first_violation(300)


def test_it_is_noticed_when_an_elected_head_acts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head.Head, "acts", property(lambda _: True))
    assert first_violation(300)


def test_it_is_noticed_when_voters_promise_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    real = voter.promise

    def promise(ballot: Any, lease: int, copy: Any) -> Any:
        return real(voter.Ballot(noted=ballot.noted, earlier=ballot.earlier), lease, copy)

    monkeypatch.setattr(voter, "promise", promise)
    assert first_violation(300)


def test_it_is_noticed_when_what_may_be_settled_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidate, "may_be_settled", lambda *_: False)
    assert first_violation(1_000)


def test_it_is_noticed_when_a_candidate_never_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidate, "may_be_settled", lambda *_: True)
    assert "does not become head" in first_violation(2_000)


def test_it_is_noticed_when_a_proposal_counts_as_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidate, "is_known_settled", lambda *_: True)
    assert first_violation(2_000)


def test_the_command_says_what_was_reached(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["succession", "--seeds", "20"])
    assert command.main() == 0
    told = capsys.readouterr().out
    assert "20 schedules" in told
    assert "0 violations" in told
    monkeypatch.setattr(sys, "argv", ["succession", "--seed", "3", "--story"])
    assert command.main() == 0
    assert "seed 3: no violation" in capsys.readouterr().out


def test_the_command_shows_what_is_wrong(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Result(7, "two are elected", story=["this", "and that"])
    monkeypatch.setattr(command, "run_seed", lambda *_, **__: broken)
    assert command.show(7, 1) == 1
    told = capsys.readouterr().out
    assert "... 1 lines before\nand that\n" in told
    assert "VIOLATION: two are elected" in told
    assert command.run_chunk(7, 9) == (Counter(), [(7, "two are elected"), (8, "two are elected")])


def test_what_was_never_reached_is_told() -> None:
    assert missing(Counter(), ENOUGH - 1) == []
    assert "acts" in missing(Counter(), ENOUGH)


def test_no_seeds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["succession", "--seeds", "0"])
    with pytest.raises(SystemExit):
        command.main()
