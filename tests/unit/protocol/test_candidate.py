"""Candidates: who becomes head, who waits, who cannot any more, and what holds up nobody."""

from __future__ import annotations

import msgspec

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
    Voters,
    X,
    Y,
    Z,
    acting,
    base_of,
    elected,
    three,
)
from torchrelay.protocol.succession.candidate import (
    Candidacy,
    Elected,
    Excluded,
    Waiting,
    asked,
    hear_answer,
    judge,
    stand,
)
from torchrelay.protocol.succession.head import first, propose
from torchrelay.protocol.succession.succession import Succession, as_settled
from torchrelay.protocol.succession.voter import Ballot


def test_a_candidate_asks_for_more_than_it_has_heard_of() -> None:
    assert stand(X, SETTLED).lease == 2
    candidacy = stand(X, SETTLED, heard=6)
    assert (candidacy.lease, candidacy.heard) == (7, 6)
    assert stand(X, SETTLED).heard == 1


def test_an_heir_becomes_head_with_the_promises_of_a_majority() -> None:
    voters = three()
    candidacy = voters.answer(stand(X, SETTLED), A)
    assert judge(candidacy) == Waiting()
    candidacy = voters.answer(candidacy, C)
    assert base_of(candidacy) == SETTLED
    assert voters.settle(elected(candidacy), A, C).acts


def test_only_one_of_two_heirs_gets_a_lease() -> None:
    voters = three()
    one = voters.answer(stand(X, SETTLED), A, B)
    two = voters.answer(stand(Y, SETTLED), A, B, C)
    assert judge(one) == Elected(SETTLED)
    assert judge(two) == Waiting()
    assert two.heard == 2
    assert stand(Y, SETTLED, heard=two.heard).lease == 3


def test_answers_to_another_candidacy_do_not_count() -> None:
    old = Ballot(promised=2, promised_to=X.copy, noted=SETTLED)
    others = Ballot(promised=3, promised_to=Y.copy, noted=SETTLED)
    candidacy = stand(X, SETTLED, heard=2)
    for ballot in (old, others):
        assert hear_answer(candidacy, A, ballot, granted=True).promises == {}
    mine = Ballot(promised=3, promised_to=X.copy, noted=SETTLED)
    assert hear_answer(candidacy, A, mine, granted=False).promises == {}
    assert hear_answer(candidacy, A, mine, granted=True).promises == {A: mine}


def test_a_refusal_tells_how_high_leases_are() -> None:
    candidacy = hear_answer(stand(X, SETTLED), A, Ballot(promised=9, promised_to=Y.copy), granted=False)
    assert candidacy.heard == 9
    assert hear_answer(candidacy, B, Ballot(promised=5), granted=False).heard == 9


def test_the_next_answer_does_not_make_a_candidate_forget_the_first() -> None:
    candidacy = three().answer(stand(X, SETTLED), A, B)
    assert set(candidacy.promises) == {A, B}
    assert candidacy.heard == 2


def test_an_heir_that_was_dropped_is_excluded() -> None:
    voters = three()
    newer = propose(acting(), (Y,), ABC).newest
    voters.note(as_settled(newer), C)
    candidacy = voters.answer(stand(X, SETTLED), C)
    assert judge(candidacy) == Waiting(), "something newer may be settled, and name it"
    assert judge(voters.answer(candidacy, A)) == Excluded(as_settled(newer))


def test_an_heir_that_knows_only_what_came_before_it_asks_the_voters() -> None:
    voters = three()
    newer = propose(acting(), (X, Y, Z), ABC).newest
    voters.note(newer, A, B)
    candidacy = stand(Z, SETTLED)
    assert judge(candidacy) == Waiting()
    assert base_of(voters.answer(candidacy, A, B)) == as_settled(newer)


def test_an_heir_that_may_have_been_dropped_waits() -> None:
    voters = three()
    newer = propose(acting(), (Y,), ABC).newest
    voters.note(newer, C)
    candidacy = voters.answer(stand(X, SETTLED), A, C)
    assert judge(candidacy) == Waiting()
    assert base_of(voters.answer(candidacy, B)) == SETTLED, "too few have noted it"


def test_an_heir_is_excluded_when_enough_say_that_they_have_noted_it() -> None:
    voters = three()
    newer = propose(acting(), (Y,), ABC).newest
    voters.note(newer, B, C)
    assert judge(voters.answer(stand(X, SETTLED), B, C)) == Excluded(as_settled(newer))


def test_a_candidate_finishes_what_may_be_settled() -> None:
    voters = three()
    newer = propose(acting(), (Y,), ABC).newest
    voters.note(newer, C)
    candidacy = voters.answer(stand(Y, SETTLED), A, C)
    assert base_of(candidacy) == newer
    assert elected(candidacy).newest.base == newer


def test_what_enough_have_noted_is_known_to_be_settled() -> None:
    voters = three()
    newer = propose(acting(), (Y,), (C, D, E)).newest
    voters.note(newer, A, B, C, D)
    candidacy = voters.answer(stand(Y, SETTLED), A, B, C)
    assert base_of_or_none(candidacy) is None, "of its own voters one has promised"
    assert base_of(voters.answer(candidacy, D)) == as_settled(newer)


def base_of_or_none(candidacy: Candidacy) -> Succession | None:
    verdict = judge(candidacy)
    return verdict.base if isinstance(verdict, Elected) else None


def test_a_settled_one_needs_its_own_voters_only() -> None:
    voters = Voters()
    newer = propose(acting(), (Y,), (C, D, E)).newest
    voters.note(as_settled(newer), D)
    voters.note(newer, E)
    for names in ((D, E), (E, D)):
        assert base_of(voters.answer(stand(Y, SETTLED), *names)) == as_settled(newer)


def test_one_that_may_be_settled_needs_the_voters_of_its_base_as_well() -> None:
    voters = three()
    newer = propose(acting(), (Y,), (D, E, F)).newest
    voters.note(newer, D, E)
    candidacy = voters.answer(stand(Y, newer), D, E)
    assert judge(candidacy) == Waiting()
    assert judge(voters.answer(candidacy, A)) == Waiting()
    assert base_of(voters.answer(candidacy, A, B)) == SETTLED, "two of the earlier voters have not noted it"


def test_a_next_proposal_tells_that_the_last_is_settled() -> None:
    voters = Voters()
    newer = propose(acting(), (X, Y), (C, D, E))
    newest = propose(voters.settle(newer, A, B, C, D), (X,), (C, D, E)).newest
    voters.note(newest, C)
    candidacy = voters.answer(stand(Y, newer.newest), C, D)
    assert judge(candidacy) == Waiting()
    assert base_of(voters.answer(candidacy, E)) == as_settled(newer.newest), "nobody of a, b is asked"


def test_a_candidate_asks_all_voters_that_it_has_heard_of() -> None:
    voters = three()
    newer = propose(acting(), (X, Y), (C, D, E)).newest
    assert asked(stand(X, SETTLED)) == {A, B, C}
    assert asked(stand(X, newer)) == {A, B, C, D, E}
    voters.note(newer, C)
    assert asked(voters.answer(stand(X, SETTLED), C)) == {A, B, C, D, E}
    assert asked(Voters().answer(stand(X, SETTLED), A)) == {A, B, C}, "it has noted nothing"


# ---------------------------------------------------------------- what went wrong before


def test_a_head_whose_first_voters_have_noted_nothing_goes_on() -> None:
    """Its process was started again amid its proposal: what came before that counts still."""
    proposed = propose(first(H, 1), (X,), ABC).newest
    candidacy = Voters().answer(stand(H, proposed), A)
    assert judge(candidacy) == Waiting()
    assert elected(Voters().answer(candidacy, A, B)).acts


def test_a_head_without_voters_and_its_heir_do_not_act_both() -> None:
    """Two voters have not noted the proposal, and its head passes it over; the heir hears from two others."""
    voters, proposed = Voters(), propose(first(H, 1), (X,), ABC).newest
    voters.note(proposed, C)
    assert elected(voters.answer(stand(H, proposed), A, B)).acts
    heir = voters.answer(stand(X, proposed, heard=2), A, C)
    assert judge(heir) == Waiting()
    assert judge(voters.answer(heir, B)) == Waiting(), "it goes on without voters: nobody can tell"


def test_the_first_heir_becomes_head_when_enough_have_noted_it() -> None:
    voters, proposed = Voters(), propose(first(H, 1), (X,), ABC).newest
    voters.note(proposed, B, C)
    candidacy = voters.answer(stand(X, proposed), A, C)
    assert judge(candidacy) == Waiting()
    assert base_of(voters.answer(candidacy, B)) == as_settled(proposed)


def test_a_head_without_voters_finishes_its_proposal_with_a_majority() -> None:
    voters, proposed = Voters(), propose(first(H, 1), (X,), ABC).newest
    voters.note(proposed, C)
    candidacy = voters.answer(stand(H, proposed), A, C)
    assert base_of(candidacy) == proposed
    assert voters.settle(elected(candidacy), A, C).acts


def test_what_an_elected_head_has_passed_over_holds_up_nobody() -> None:
    """Two proposals follow the same, and neither is settled: each voter has noted another."""
    voters = three()
    voters.note(propose(acting(), (X, Z), ABC).newest, C)
    voters.note(elected(voters.answer(stand(X, SETTLED), A, B)).newest, A)
    assert base_of(voters.answer(stand(Y, SETTLED, heard=2), *ABC)) == SETTLED


def test_a_head_that_came_and_went_twice_holds_up_nobody() -> None:
    """What it proposed was noted by one voter, what it proposed then by another, and it is lost."""
    voters = three()
    first_try = elected(voters.answer(stand(X, SETTLED), B, C)).newest
    voters.note(first_try, B)
    second_try = elected(voters.answer(stand(X, first_try), B, C)).newest
    voters.note(second_try, A)
    assert second_try.base == first_try
    assert base_of(voters.answer(stand(Y, SETTLED, heard=3), *ABC)) == SETTLED


def test_an_answer_heard_twice_is_what_it_was() -> None:
    voters = three()
    candidacy = voters.answer(stand(X, SETTLED), A, B)
    assert voters.answer(candidacy, A, B) == candidacy


def test_what_many_have_noted_is_kept_once() -> None:
    newer = propose(acting(), (Y,), ABC).newest
    said = [
        Ballot(promised=2, promised_to=X.copy, noted=msgspec.structs.replace(noted), earlier=earlier)
        for noted, earlier in ((SETTLED, ()), (newer, (SETTLED.order,)), (SETTLED, ()), (as_settled(newer), ()))
    ]
    candidacy = stand(X, SETTLED)
    for voter, ballot in zip((A, B, C, D), said, strict=True):
        candidacy = hear_answer(candidacy, voter, ballot, granted=True)
    assert candidacy.told == (SETTLED, newer, as_settled(newer))
    assert candidacy.promises == dict(zip((A, B, C, D), said, strict=True))
    assert candidacy.promises[A].noted is candidacy.promises[C].noted
    assert candidacy.noters == {SETTLED.order: {A, B, C}, newer.order: {B, D}}
    assert hear_answer(candidacy, B, said[1], granted=True) == candidacy


def test_only_the_last_answer_of_a_voter_counts() -> None:
    newer = propose(acting(), (Y,), ABC).newest
    one, two = (Ballot(promised=2, promised_to=X.copy, noted=noted) for noted in (newer, SETTLED))
    candidacy = hear_answer(stand(X, SETTLED), A, one, granted=True)
    candidacy = hear_answer(candidacy, B, two, granted=True)
    candidacy = hear_answer(candidacy, A, two, granted=True)
    assert candidacy.told == (SETTLED,)
    assert candidacy.noters == {SETTLED.order: {A, B}}
    assert candidacy.promises == {A: two, B: two}


def test_a_voter_that_has_noted_nothing_has_promised_all_the_same() -> None:
    candidacy = hear_answer(stand(X, SETTLED), A, Ballot(promised=2, promised_to=X.copy), granted=True)
    assert (set(candidacy.promises), candidacy.told, candidacy.noters) == ({A}, (), {})
