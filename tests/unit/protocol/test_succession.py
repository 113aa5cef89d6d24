"""Succession: what voters note, what a head proposes, and what may leave it."""

from __future__ import annotations

import pytest

from tests.support.succession import (
    ABC,
    SETTLED,
    A,
    B,
    C,
    D,
    E,
    F,
    H,
    X,
    Y,
    Z,
    acting,
    elected,
    three,
)
from torchrelay.protocol.succession.candidate import stand
from torchrelay.protocol.succession.copying import Copying, forget, hear_held, let_leave, may_be_heirs, write
from torchrelay.protocol.succession.head import Head, first, hear_noted, propose, take_office
from torchrelay.protocol.succession.succession import CopyId, Succession, as_settled, is_majority, may_be_majority
from torchrelay.protocol.succession.voter import Ballot, note, promise

# ---------------------------------------------------------------- majorities


def test_two_of_three_are_a_majority_and_one_is_not() -> None:
    assert is_majority({A, C}, ABC)
    assert not is_majority({A}, ABC)
    assert not is_majority({A, D, E}, ABC), "strangers do not count"


def test_half_is_no_majority() -> None:
    assert not is_majority({A, B}, (A, B, C, D))
    assert is_majority({A, B, D}, (A, B, C, D))


def test_a_voter_that_is_named_twice_counts_once() -> None:
    assert not is_majority({A}, (A, A, B))
    assert may_be_majority({A}, (A, A, B, C))
    assert not may_be_majority({A, B}, (A, B, C, C, C))


def test_of_nobody_nobody_is_a_majority() -> None:
    assert is_majority((), ())
    assert may_be_majority({A}, ())


def test_it_can_become_a_majority_until_half_have_refused() -> None:
    assert may_be_majority({A}, ABC)
    assert not may_be_majority({A, B}, ABC)
    assert not may_be_majority({A, B}, (A, B, C, D))
    assert may_be_majority({A, E, F}, ABC), "strangers do not count"


# ---------------------------------------------------------------- successions


def test_a_later_lease_is_newer_whatever_its_version() -> None:
    later = Succession(lease=2, version=1, head=X)
    assert later.order > SETTLED.order
    assert SETTLED.order == (1, 4)


def test_a_succession_names_the_copies_that_count() -> None:
    assert [SETTLED.has_copy(each.copy) for each in (H, X, Y, Z)] == [True, True, True, False]


def test_voters_of_the_base_and_of_its_base_must_note_it_as_well() -> None:
    changed = propose(acting(), (X, Y), (C, D, E)).newest
    assert changed.groups == ((C, D, E), ABC)
    assert take_office(X, 2, changed).newest.groups == ((C, D, E), ABC), "each group once"


def test_what_is_settled_follows_nothing_that_still_counts() -> None:
    changed = propose(acting(), (X, Y), (C, D, E)).newest
    assert [each.order for each in changed.chain] == [(1, 5), (1, 4)]
    assert as_settled(changed).groups == ((C, D, E),)
    assert as_settled(changed).order == changed.order


# ---------------------------------------------------------------- voters


def test_a_voter_notes_what_is_new_and_what_it_has_noted() -> None:
    ballot, noted = note(Ballot(), SETTLED)
    assert noted
    assert ballot == Ballot(promised=1, promised_to=H.copy, noted=SETTLED)
    assert note(ballot, SETTLED) == (ballot, True)


def test_a_voter_notes_nothing_of_a_lower_lease_than_it_has_promised() -> None:
    ballot, _ = promise(Ballot(), 2, X.copy)
    assert note(ballot, SETTLED) == (ballot, False)


def test_under_one_lease_a_voter_listens_to_one_candidate() -> None:
    ballot, _ = promise(Ballot(), 2, X.copy)
    assert note(ballot, Succession(lease=2, version=1, head=Y)) == (ballot, False)
    assert note(ballot, Succession(lease=2, version=1, head=X))[1]


def test_a_voter_that_was_not_asked_notes_what_a_later_lease_says() -> None:
    ballot, _ = promise(Ballot(), 2, X.copy)
    later = Succession(lease=3, version=1, head=Y)
    ballot, noted = note(ballot, later)
    assert noted
    assert (ballot.promised, ballot.promised_to) == (3, Y.copy)


def test_a_voter_does_not_go_back_to_what_is_older() -> None:
    newer = propose(acting(), (X,), ABC).newest
    ballot, _ = note(note(Ballot(), SETTLED)[0], newer)
    assert note(ballot, SETTLED) == (ballot, False)
    settled, _ = note(ballot, as_settled(newer))
    assert note(settled, SETTLED) == (settled, False)


def test_a_proposal_that_comes_late_is_noted_and_stays_settled() -> None:
    newer = propose(acting(), (X,), ABC).newest
    ballot, _ = note(Ballot(), as_settled(newer))
    assert note(ballot, newer) == (ballot, True)


def test_a_voter_notes_what_follows_a_settled_one() -> None:
    ballot, _ = note(Ballot(), SETTLED)
    newer = propose(acting(), (X,), ABC).newest
    ballot, noted = note(ballot, newer)
    assert noted
    assert (ballot.noted, ballot.earlier) == (newer, (SETTLED.order,))


def test_a_voter_that_hears_that_it_is_settled_knows_it() -> None:
    newer = propose(acting(), (X,), ABC).newest
    ballot, noted = note(note(Ballot(), newer)[0], as_settled(newer))
    assert noted
    assert ballot.noted == as_settled(newer)


def test_a_voter_remembers_what_it_has_noted_of_what_a_newer_one_follows() -> None:
    one = take_office(X, 2, SETTLED).newest
    two = take_office(X, 3, one).newest
    ballot, _ = note(note(Ballot(), one)[0], two)
    assert ballot.has_noted(one.order)
    assert ballot.has_noted(two.order)
    assert not ballot.has_noted(SETTLED.order)
    assert not Ballot().has_noted(SETTLED.order)


def test_a_voter_forgets_what_a_newer_one_has_passed_over() -> None:
    passed = propose(acting(), (X,), ABC).newest
    ballot, _ = note(note(Ballot(), passed)[0], take_office(Y, 2, SETTLED).newest)
    assert not ballot.has_noted(passed.order)


def test_a_voter_promises_a_higher_lease() -> None:
    ballot, granted = promise(note(Ballot(), SETTLED)[0], 2, X.copy)
    assert granted
    assert ballot == Ballot(promised=2, promised_to=X.copy, noted=SETTLED)


def test_a_promise_is_given_again_to_whom_it_was_given() -> None:
    ballot, _ = promise(Ballot(), 2, X.copy)
    assert promise(ballot, 2, X.copy) == (ballot, True)
    assert promise(ballot, 2, Y.copy) == (ballot, False)
    assert promise(ballot, 1, X.copy) == (ballot, False)


def test_nobody_is_promised_a_lease_under_which_somebody_is_head() -> None:
    ballot, _ = note(Ballot(), take_office(X, 2, SETTLED).newest)
    assert promise(ballot, 2, X.copy) == (ballot, False)
    assert promise(ballot, 3, X.copy)[1]


# ---------------------------------------------------------------- heads


def test_the_first_head_acts_and_asks_nobody() -> None:
    head = first(H, 1)
    assert head.acts
    assert head.newest == Succession(lease=1, version=0, head=H)
    assert head.needed == ()


def test_a_proposal_is_settled_by_a_majority() -> None:
    head = propose(acting(), (X,), ABC)
    one = hear_noted(head, A, (1, 5))
    assert one.proposed is not None
    assert hear_noted(one, A, (1, 5)) == one, "one voter counts once"
    assert hear_noted(one, B, (1, 5)) == Head(settled=as_settled(head.newest))


def test_an_answer_to_something_else_does_not_count() -> None:
    head = hear_noted(propose(acting(), (X,), ABC), A, (1, 5))
    assert hear_noted(head, B, (1, 4)) == head
    assert hear_noted(acting(), B, (1, 4)) == acting()


def test_a_proposal_needs_majorities_of_both_groups_of_voters() -> None:
    head = propose(acting(), (X, Y), (C, D, E))
    head = hear_noted(hear_noted(head, D, (1, 5)), E, (1, 5))
    assert head.proposed is not None
    head = hear_noted(head, A, (1, 5))
    assert head.proposed is not None
    assert hear_noted(head, B, (1, 5)).settled.voters == (C, D, E)


def test_what_is_proposed_is_the_next_version_of_the_same_head() -> None:
    newest = propose(acting(), (Y, Z), (C, D, E)).newest
    assert newest == Succession(lease=1, version=5, head=H, heirs=(Y, Z), voters=(C, D, E), base=SETTLED)


def test_a_proposal_of_what_is_so_is_none() -> None:
    assert propose(acting(), (X, Y), ABC) == acting()
    assert propose(acting(), (X, Y), (A, B)) != acting()


def test_an_open_proposal_is_finished_first() -> None:
    head = hear_noted(propose(acting(), (X,), ABC), A, (1, 5))
    assert propose(head, (), ABC) == head


def test_heirs_need_voters() -> None:
    """Each of them could become head at once, and the head as well."""
    with pytest.raises(AssertionError, match="heirs need voters"):
        propose(first(H, 1), (X,), ())
    assert propose(first(H, 1), (), ABC).newest.voters == ABC


def test_a_head_acts_while_it_changes_heirs() -> None:
    assert propose(acting(), (X,), ABC).acts


def test_who_was_elected_acts_when_a_majority_has_noted_it() -> None:
    head = take_office(X, 2, SETTLED)
    assert not head.acts
    assert head.newest == Succession(lease=2, version=1, head=X, voters=ABC, base=SETTLED)
    head = hear_noted(hear_noted(head, C, (2, 1)), B, (2, 1))
    assert head.acts
    assert head.settled == as_settled(head.newest)


def test_a_head_without_voters_that_is_started_again_acts_at_once() -> None:
    head = elected(stand(H, first(H, 1).newest))
    assert head.acts
    assert head.newest.order == (2, 1)


# ---------------------------------------------------------------- copying


def copied(**held: int) -> Copying:
    """What a head knows that has written nine parts."""
    copying = Copying(written=9)
    for name, part in held.items():
        copying = hear_held(copying, CopyId(name), part)
    return copying


def left(copying: Copying, head: Head) -> int:
    return let_leave(copying, head).left


def test_what_all_heirs_have_may_leave() -> None:
    assert left(copied(x=7, y=5), acting()) == 5
    assert left(copied(x=7), acting()) == 0, "nothing was heard from y"


def test_a_head_without_heirs_waits_for_nobody() -> None:
    assert left(Copying(), first(H, 1)) == 0
    assert left(copied(), first(H, 1)) == 9
    assert left(write(copied()), first(H, 1)) == 10
    assert left(copied(x=3), acting(Succession(lease=1, version=5, head=H, voters=ABC))) == 9


def test_nothing_leaves_who_does_not_act() -> None:
    alone = Succession(lease=1, version=5, head=H, voters=ABC)
    assert left(copied(), take_office(H, 2, alone)) == 0


def test_what_is_written_takes_nothing_from_what_copies_have() -> None:
    assert write(copied(x=7)).held == {X.copy: 7}


def test_an_older_word_of_a_copy_changes_nothing() -> None:
    assert hear_held(copied(x=7, y=5), X.copy, 6) == copied(x=7, y=5)
    assert copied(x=0).held == {X.copy: 0}


def test_a_copy_that_is_no_more_has_nothing() -> None:
    assert forget(copied(x=7, y=5), X.copy) == copied(y=5)


def test_what_has_left_has_left() -> None:
    copying = let_leave(copied(x=7, y=5), acting())
    assert left(forget(copying, Y.copy), acting()) == 5
    assert left(copying, propose(acting(), (X, Z), ABC)) == 5


def test_heirs_that_are_proposed_count_beside_those_there_are() -> None:
    head = propose(acting(), (Y, Z), ABC)
    assert head.needed == (X, Y, Z)
    assert left(copied(x=7, y=6, z=2), head) == 2
    assert left(copied(x=3, y=6, z=7), head) == 3


def test_an_heir_that_is_dropped_counts_until_that_is_settled() -> None:
    head = propose(acting(), (Y,), ABC)
    assert left(copied(x=3, y=6), head) == 3
    assert left(copied(x=3, y=6), three().settle(head, A, B)) == 6


def test_who_lacks_what_has_left_cannot_be_an_heir() -> None:
    copying = let_leave(copied(x=7, y=6, z=5), acting())
    assert not may_be_heirs(copying, (Y, Z))
    assert may_be_heirs(hear_held(copying, Z.copy, 6), (Y, Z))
    assert not may_be_heirs(forget(copying, X.copy), (Y, Z)), "it had left before x was forgotten"


def test_a_copy_that_nothing_was_heard_from_cannot_be_an_heir() -> None:
    assert not may_be_heirs(copied(x=0, y=0), (X, Z))
    assert may_be_heirs(copied(x=0, y=0, z=0), (X, Z))


def test_who_becomes_an_heir_of_a_head_without_any_has_all() -> None:
    assert not may_be_heirs(let_leave(copied(x=8), first(H, 1)), (X,))
    assert may_be_heirs(let_leave(copied(x=9), first(H, 1)), (X,))


def test_heirs_that_are_silent_can_be_dropped() -> None:
    copying = let_leave(copied(x=9, y=3), acting())
    assert may_be_heirs(copying, (X,))
    assert may_be_heirs(copying, ())


def test_a_new_head_has_no_heirs_as_they_lack_its_copy() -> None:
    assert take_office(X, 2, SETTLED).newest.heirs == ()
