"""Door: who waits at it, when it stands for head, and what comes of that. Search: where agents look meanwhile."""

from __future__ import annotations

import msgspec

from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.succession import door as doors
from torchrelay.protocol.succession import search as searching
from torchrelay.protocol.succession.appointing import choose_voters, to_appoint, want
from torchrelay.protocol.succession.candidate import Elected, Excluded, Waiting
from torchrelay.protocol.succession.door import Door
from torchrelay.protocol.succession.head import Head, first
from torchrelay.protocol.succession.search import BRIEF_MS, DOOR_MS, HEAD_MS, LONGEST_MS, SILENT_MS
from torchrelay.protocol.succession.succession import CopyId, Place, Succession, VoterId
from torchrelay.protocol.succession.voter import Ballot, node_of, promise, voter_of

A, B, C, D = (Place(NodeId(name), CopyId(f"{name}#1")) for name in "abcd")
VOTERS = tuple(voter_of(place.node, "1") for place in (A, B, C))
NOW = Succession(lease=1, version=3, head=A, heirs=(B, C), voters=VOTERS, before=(VOTERS,))
NOTED = Ballot(promised=1, promised_to=A.copy, noted=NOW, settled=True)
HEIR = Door(place=B, known=NOW, settled=True)


def with_all(door: Door, *voters: VoterId) -> Door:
    for voter in voters:
        door = doors.come(door, voter, NOTED)
    return door


def answered(door: Door, voter: VoterId, ballot: Ballot = NOTED) -> Door:
    """A voter is asked, and answers."""
    assert door.candidacy is not None
    lease = door.candidacy.lease
    said, granted = promise(ballot, lease, door.place.copy)
    return doors.hear_answer(door, voter, said, lease=lease, granted=granted)


def test_an_heir_stands_when_a_majority_waits_at_its_door() -> None:
    one = with_all(HEIR, VOTERS[1])
    assert not doors.may_stand(one)
    two = with_all(one, VOTERS[2])
    assert doors.may_stand(two)
    assert not doors.may_stand(doors.go(two, VOTERS[2]))
    standing = doors.stand(two)
    assert not doors.may_stand(standing)
    assert doors.to_ask(standing) == VOTERS[1:]


def test_an_heir_is_elected_by_the_promises_of_a_majority() -> None:
    door = doors.stand(with_all(HEIR, *VOTERS[1:]))
    assert doors.judge(door) == Waiting()
    door = answered(door, VOTERS[1])
    assert doors.to_ask(door) == VOTERS[2:]
    assert doors.judge(answered(door, VOTERS[2])) == Elected(NOW, True)


def test_who_stands_takes_no_part_of_a_lower_lease_any_more() -> None:
    assert doors.takes_parts(HEIR, 1)
    standing = doors.stand(with_all(HEIR, *VOTERS))
    assert not doors.takes_parts(standing, 1)
    assert not doors.takes_parts(msgspec.structs.replace(standing, candidacy=None), 1)  # after a restart, too
    assert doors.takes_parts(standing, 3)


def test_a_lease_is_higher_than_all_that_was_heard_of() -> None:
    heard = doors.come(HEIR, VOTERS[0], msgspec.structs.replace(NOTED, promised=7, promised_to=C.copy))
    assert doors.stand(with_all(heard, *VOTERS)).stood == 8


def test_a_candidate_that_was_refused_stands_again() -> None:
    door = doors.stand(with_all(HEIR, *VOTERS))
    elsewhere = msgspec.structs.replace(NOTED, promised=2, promised_to=C.copy)
    refused = answered(answered(answered(door, VOTERS[1]), VOTERS[2]), VOTERS[0], elsewhere)
    assert doors.judge(refused) == Waiting()
    assert doors.may_stand(refused)
    assert doors.stand(refused).stood == 3


def test_a_voter_that_has_noted_what_a_candidate_proposed_does_not_refuse_it() -> None:
    """Its question was late, or came twice."""
    door = doors.stand(with_all(HEIR, *VOTERS))
    proposed = msgspec.structs.replace(NOW, lease=2, version=1, head=B, heirs=())
    late = answered(door, VOTERS[1], Ballot(promised=2, promised_to=B.copy, noted=proposed))
    assert not late.refused


def test_answers_to_a_former_candidacy_count_for_nothing() -> None:
    door = doors.stand(with_all(HEIR, *VOTERS))
    stale = doors.hear_answer(door, VOTERS[0], NOTED, lease=1, granted=True)
    assert stale.candidacy == door.candidacy


def test_an_heir_that_a_newer_succession_goes_without_is_excluded() -> None:
    newer = msgspec.structs.replace(NOW, version=4, heirs=(C,))
    settled = Ballot(promised=1, promised_to=A.copy, noted=newer, settled=True)
    door = doors.stand(doors.come(with_all(HEIR, *VOTERS), VOTERS[0], settled))
    assert door.known == newer
    assert doors.judge(answered(answered(door, VOTERS[0], settled), VOTERS[2])) == Excluded(newer)


def test_voters_of_the_succession_before_are_enough_to_stand() -> None:
    """The last words of a head that is lost: it wanted to be alone, and nobody has noted that."""
    alone = msgspec.structs.replace(NOW, version=4, heirs=(), voters=(), before=(VOTERS,))
    door = with_all(doors.learn(HEIR, alone, settled=False), *VOTERS[1:])
    assert doors.may_stand(door)
    elected = answered(answered(doors.stand(door), VOTERS[1]), VOTERS[2])
    assert doors.judge(elected) == Elected(NOW, True)


def test_a_new_door_has_heard_of_nobody() -> None:
    zero = Succession(lease=0, version=0, head=A, heirs=(B,), voters=VOTERS)
    door = doors.come(Door(place=B, known=zero), VOTERS[0], Ballot())
    assert not door.settled
    assert not door.refused
    assert doors.takes_parts(door, 1)
    assert doors.to_ask(door) == ()
    assert doors.judge(door) == Waiting()
    assert doors.stand(door).stood == 1
    assert not doors.learn(door, zero, settled=False).settled


def test_no_part_of_its_own_lease_is_taken() -> None:
    assert not doors.takes_parts(doors.stand(with_all(HEIR, *VOTERS)), 2)


def test_former_voters_are_not_enough_once_it_is_settled() -> None:
    more = msgspec.structs.replace(NOW, version=4, voters=(*VOTERS, VoterId("d/1"), VoterId("e/1")), before=(VOTERS,))
    assert not doors.may_stand(with_all(doors.learn(HEIR, more, settled=True), *VOTERS[1:]))
    assert doors.may_stand(with_all(doors.learn(HEIR, more, settled=False), *VOTERS[1:]))


def test_a_late_answer_is_heard_of_whatever_it_was_asked_for() -> None:
    high = msgspec.structs.replace(NOTED, promised=9, promised_to=C.copy)
    waits = doors.hear_answer(with_all(HEIR, *VOTERS), VOTERS[0], high, lease=2, granted=False)
    assert waits.candidacy is None
    assert doors.stand(waits).stood == 10
    late = doors.hear_answer(doors.stand(with_all(HEIR, *VOTERS)), VOTERS[0], high, lease=1, granted=False)
    assert not late.refused
    assert doors.stand(late).stood == 10


def test_who_was_refused_once_is_not_elected_by_others() -> None:
    elsewhere = msgspec.structs.replace(NOTED, promised=2, promised_to=C.copy)
    door = answered(doors.stand(with_all(HEIR, *VOTERS)), VOTERS[0], elsewhere)
    door = answered(answered(door, VOTERS[1]), VOTERS[2])
    assert doors.judge(door) == Waiting()
    assert doors.may_stand(door)


def test_where_there_are_no_voters_only_the_head_acts_again() -> None:
    known = first(A, 4).settled
    assert doors.may_stand(Door(place=A, known=known, settled=True))
    assert not doors.may_stand(Door(place=B, known=known, settled=True))


def test_older_successions_are_not_learnt() -> None:
    older = msgspec.structs.replace(NOW, version=2)
    assert doors.learn(HEIR, older, settled=True) == HEIR
    assert doors.learn(msgspec.structs.replace(HEIR, settled=False), NOW, settled=True).settled
    assert doors.learn(HEIR, NOW, settled=False).settled


# ---------------------------------------------------------------- what a head wants


def head() -> Head:
    return Head(settled=NOW)


LIVING = {place.node: voter_of(place.node, "1") for place in (A, B, C, D)}


def test_all_nodes_that_live_vote() -> None:
    assert choose_voters(head(), LIVING, LIVING) == (*VOTERS, voter_of(D.node, "1"))
    some = {A.node, B.node, C.node}
    assert choose_voters(head(), some, {A.node: LIVING[A.node]}) == VOTERS  # they were voters before
    assert choose_voters(head(), some, {C.node: voter_of(C.node, "2")})[2] == voter_of(C.node, "2")


def test_two_nodes_have_no_voters_and_no_heirs() -> None:
    two = {A.node: LIVING[A.node], B.node: LIVING[B.node]}
    wanted = want(head(), living=two, attached=two, whole=(B,)).newest
    assert (wanted.voters, wanted.heirs) == ((), ())


def test_heirs_stay_as_long_as_their_copies_are_whole() -> None:
    attached = {place.node: LIVING[place.node] for place in (A, B, C)}
    assert want(head(), living=attached, attached=attached, whole=(C, B)) == head()
    without = want(head(), living=attached, attached=attached, whole=(C,)).newest
    assert without.heirs == (C,)
    other = want(head(), living=attached, attached=attached, whole=(D, C)).newest
    assert other.heirs == (C, D)


def test_new_heirs_are_taken_in_the_order_of_their_nodes() -> None:
    alone = Head(settled=msgspec.structs.replace(NOW, heirs=()))
    assert want(alone, living=LIVING, attached=LIVING, whole=(D, C, B)).newest.heirs == (B, C)


def test_nodes_are_appointed_until_there_are_two() -> None:
    assert to_appoint(head(), attached=LIVING, copying={B.copy: B, C.copy: C}) == ()
    lost = Head(settled=msgspec.structs.replace(NOW, heirs=(B,)))
    assert to_appoint(lost, attached=LIVING, copying={B.copy: B}) == (C.node,)
    assert to_appoint(head(), attached=LIVING, copying={B.copy: B}) == (D.node,)  # C is needed until that is settled
    assert to_appoint(first(A, 1), attached=LIVING, copying={}) == ()


def test_a_voter_is_named_after_its_node() -> None:
    assert node_of(voter_of(NodeId("rack/7"), "2")) == "rack/7"


# ---------------------------------------------------------------- where agents look


def test_the_head_is_looked_for_first_and_then_each_heir() -> None:
    places = NOW.copies
    search = searching.begin(1_000)
    assert searching.place_of(search, places) == A
    assert not searching.passes_over(search)
    assert not searching.is_over(search, 1_000 + HEAD_MS - 1)
    assert searching.is_over(search, 1_000 + HEAD_MS)
    seen = []
    for _ in range(4):
        search = searching.go_on(search, places, 0, 0.5)
        seen.append(searching.place_of(search, places))
    assert seen == [B, C, A, B]
    assert searching.passes_over(search)


def test_rounds_get_longer_and_differ_by_chance() -> None:
    search, waits = searching.begin(0), []
    for _ in range(30):
        search = searching.go_on(search, NOW.copies, 0, 0.5)
        waits.append(search.until_ms)
    assert waits[0] == DOOR_MS
    assert waits == sorted(waits)
    assert waits[-1] == LONGEST_MS
    ends = {searching.go_on(search, NOW.copies, 0, chance).until_ms for chance in (0.0, 1.0)}
    assert ends == {LONGEST_MS // 2, LONGEST_MS * 3 // 2}


def test_who_has_lost_the_head_for_a_moment_is_back_before_its_node_is_lost() -> None:
    """It looks at the head again after two doors, at worst."""
    assert HEAD_MS + 2 * DOOR_MS * 3 // 2 < 6_000
    assert SILENT_MS < 6_000 - HEAD_MS
    assert BRIEF_MS < DOOR_MS // 2


def test_an_heir_that_hears_the_head_sends_agents_back_to_it() -> None:
    places = NOW.copies
    first_door = searching.go_on(searching.begin(0), places, 0, 0.5)
    assert searching.passes_over(first_door)
    search = searching.send_back(first_door, places, 100)
    assert search.until_ms == 100 + BRIEF_MS < DOOR_MS
    assert searching.send_back(first_door, places, DOOR_MS).until_ms == DOOR_MS
    assert searching.place_of(searching.go_on(search, places, 0, 0.5), places) == A


def test_places_of_before_are_remembered_until_what_is_noted_is_settled() -> None:
    alone = msgspec.structs.replace(NOW, version=4, heirs=())
    assert searching.remember(NOW.copies, alone, settled=False) == (A, B, C)
    assert searching.remember(NOW.copies, alone, settled=True) == (A,)
    again = Place(B.node, CopyId("b#2"))
    assert searching.gather((again,), (A, B)) == (again, A)
