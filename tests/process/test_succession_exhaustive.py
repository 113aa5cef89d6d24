"""Exhaustive: small worlds of heads, heirs and voters, in every order of things; and that a broken rule is noticed."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.succession_live import Live
from tests.support.succession_world import A, B, C, Change, D, H, State, Violation, World, X, Y, explore
from torchrelay.protocol.succession import candidate, copying, head, succession, voter
from torchrelay.protocol.succession.candidate import Candidacy, Elected, Verdict, Waiting
from torchrelay.protocol.succession.succession import Succession, is_majority
from torchrelay.protocol.succession.voter import Ballot

ABC = (A, B, C)
NOBODY: Change = ((), ABC)
TO_D: Change = ((), (D,))


def small(*changes: Change, **fields: Any) -> World:
    """Two leases and one change, if nothing else is said."""
    given: dict[str, Any] = {"leases": 2, "parts": 1, "versions": 1, "tells_settled": False, **fields}
    return World(changes=changes, **given)


def first_heir(**fields: Any) -> tuple[World, State]:
    """A head that was alone, and its first heir and voters."""
    world = small(((X,), ABC), **{"versions": 0, **fields})
    return world, world.alone()


def dropped_heir(**fields: Any) -> tuple[World, State]:
    """An heir that a head does without."""
    world = small(NOBODY, **fields)
    return world, world.protected(X)


def other_heir(**fields: Any) -> tuple[World, State]:
    """An heir in place of another."""
    world = small(((Y,), ABC), places=(H, X, Y), **fields)
    return world, world.protected(X)


def two_heirs(**fields: Any) -> tuple[World, State]:
    """Two heirs, of which one is dropped."""
    world = small(((Y,), ABC), places=(H, X, Y), **fields)
    return world, world.protected(X, Y)


def other_voters(**fields: Any) -> tuple[World, State]:
    """All voters give way to another, and the heir is dropped."""
    world = small(TO_D, voters=(A, B, C, D), **fields)
    return world, world.protected(X)


def walk(made: tuple[World, State], limit: int) -> int:
    world, start = made
    return explore(world, start, limit=limit, look=Live())


# ---------------------------------------------------------------- nothing is ever wrong


def test_an_heir_that_is_dropped_in_every_order_of_things() -> None:
    assert 5_000 < walk(dropped_heir(), 100_000) < 100_000, "these are all states"


def test_an_heir_that_is_dropped_and_voters_that_hear_that_it_is_settled() -> None:
    assert walk(dropped_heir(tells_settled=True), 8_000) == 8_000


def test_a_first_heir_in_many_orders_of_things() -> None:
    assert walk(first_heir(), 8_000) == 8_000


def test_three_leases_in_many_orders_of_things() -> None:
    assert walk(dropped_heir(leases=3), 6_000) == 6_000
    assert walk(first_heir(leases=3), 6_000) == 6_000


def test_another_heir_in_many_orders_of_things() -> None:
    assert walk(other_heir(), 6_000) == 6_000
    assert walk(two_heirs(leases=3, parts=0), 6_000) == 6_000


def test_other_voters_in_many_orders_of_things() -> None:
    assert walk(other_voters(), 6_000) == 6_000


# ---------------------------------------------------------------- a rule that is broken is noticed


def noticed(made: tuple[World, State], limit: int = 40_000) -> str:
    """What the walk says."""
    with pytest.raises(Violation) as raised:
        walk(made, limit)
    return str(raised.value).splitlines()[0]


def test_heirs_that_lack_what_has_left_are_noticed() -> None:
    assert "lacks what has left" in noticed(other_heir(waits=False))
    assert "lacks what has left" in noticed(first_heir(waits=False))


def test_it_is_noticed_when_heirs_of_a_proposal_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head.Head, "needed", property(lambda self: self.settled.heirs))
    assert "lacks what has left" in noticed(first_heir())


def test_it_is_noticed_when_heirs_to_be_dropped_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head.Head, "needed", property(lambda self: self.newest.heirs))
    assert "lacks what has left" in noticed(dropped_heir())


def test_it_is_noticed_when_nobody_waits_for_heirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "let_leave", lambda known, _: replace(known, left=known.written))
    assert "lacks what has left" in noticed(dropped_heir())


def test_it_is_noticed_when_an_elected_head_acts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head.Head, "acts", property(lambda _: True))
    assert "lacks what has left" in noticed(dropped_heir())


def test_it_is_noticed_when_voters_break_their_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    real = voter.note
    monkeypatch.setattr(voter, "note", lambda ballot, told: real(replace(ballot, promised=0), told))
    assert noticed(dropped_heir())


def test_it_is_noticed_when_voters_promise_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    def promise(ballot: Ballot, lease: int, copy: Any) -> tuple[Ballot, bool]:
        return replace(ballot, promised=max(lease, ballot.promised), promised_to=copy), True

    monkeypatch.setattr(voter, "promise", promise)
    assert "two are elected" in noticed(dropped_heir())


def test_it_is_noticed_when_half_of_the_voters_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def enough(some: Any, voters: Any) -> bool:
        return not voters or len(set(some) & set(voters)) >= 1

    for module in (candidate, head):
        monkeypatch.setattr(module, "is_majority", enough)
    assert noticed(dropped_heir())


def test_it_is_noticed_when_earlier_voters_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Succession, "groups", property(lambda self: (self.voters,)))
    assert noticed(other_voters())


def test_it_is_noticed_when_only_what_is_newest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    real = candidate.judge_by

    def judge(candidacy: Candidacy) -> Verdict:
        return real(candidacy, max(candidate.seen_by(candidacy), key=lambda each: each.order))

    monkeypatch.setattr(candidate, "judge", judge)
    assert "cannot become head" in noticed(dropped_heir())


def test_it_is_noticed_when_what_may_be_settled_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidate, "may_be_settled", lambda *_: False)
    assert "passes over what is settled" in noticed(dropped_heir())


def test_it_is_noticed_when_all_that_was_proposed_counts_as_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidate, "is_known_settled", lambda *_: True)
    assert "cannot become head" in noticed(dropped_heir())


def test_it_is_noticed_when_an_heir_finishes_what_a_lone_head_may_pass_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def judge_by(candidacy: Candidacy, base: Succession) -> Verdict:
        enough = all(is_majority(candidacy.promises, group) for group in base.groups)
        return Elected(base) if enough and base.has_copy(candidacy.place.copy) else Waiting()

    monkeypatch.setattr(candidate, "judge_by", judge_by)
    assert noticed(first_heir(leases=3, parts=0), limit=100_000)


def test_it_is_noticed_when_voters_forget_what_they_noted_before(monkeypatch: pytest.MonkeyPatch) -> None:
    real = voter.note

    def note(ballot: Ballot, told: Succession) -> tuple[Ballot, bool]:
        after, noted = real(ballot, told)
        return replace(after, earlier=()), noted

    monkeypatch.setattr(voter, "note", note)
    assert "passes over what is settled" in noticed(two_heirs(leases=3, parts=0, standing=(X, Y)), limit=100_000)


def test_it_is_noticed_when_a_succession_is_told_without_its_base(monkeypatch: pytest.MonkeyPatch) -> None:
    real = head.propose
    stripped = succession.as_settled
    monkeypatch.setattr(
        head, "propose", lambda *given: replace(one := real(*given), proposed=one.proposed and stripped(one.proposed))
    )
    assert noticed(dropped_heir())
