"""Door: who waits at it, when it stands for head, and what comes of that. Search: where agents look meanwhile."""

from __future__ import annotations

import msgspec

from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.succession import door as doors
from torchrelay.protocol.succession import search as searching
from torchrelay.protocol.succession.candidate import Waiting
from torchrelay.protocol.succession.candidate import judge as judge_candidacy
from torchrelay.protocol.succession.door import Door
from torchrelay.protocol.succession.search import DOOR_MS, PATIENCE_MS, Search
from torchrelay.protocol.succession.succession import CopyId, Place, Succession, VoterId, others_in
from torchrelay.protocol.succession.voter import Ballot, in_short, note, promise

A, B, C, D = (Place(NodeId(name), CopyId(f"{name}#1"), f"https://{name}:1") for name in "abcd")
VOTERS = tuple(VoterId(f"{place.node}.0") for place in (A, B, C))
NOW = Succession(lease=1, version=3, head=A, heirs=(B, C), voters=VOTERS)
NOTED = Ballot(promised=1, promised_to=A.copy, noted=NOW)
HEIR = Door(place=B, known=NOW)


def with_all(door: Door, *voters: VoterId) -> Door:
    for voter in voters or VOTERS:
        door = doors.come(door, voter)
    return door


def answered(door: Door, voter: VoterId, ballot: Ballot = NOTED) -> Door:
    """A voter is asked for a promise, and answers."""
    assert door.candidacy is not None
    said, granted = promise(ballot, door.candidacy.lease, door.place.copy)
    return doors.hear_vote(door, voter, said, granted=granted)


def elected() -> Door:
    return answered(answered(doors.stand(with_all(HEIR)), VOTERS[1]), VOTERS[2])


def noted_by(door: Door, *voters: VoterId) -> Door:
    for voter in voters:
        assert door.head is not None
        said, granted = note(NOTED, door.head.newest)
        door = doors.hear_vote(door, voter, in_short(said), granted=granted)
    return door


def test_an_heir_stands_when_a_majority_waits_at_its_door() -> None:
    one = with_all(HEIR, VOTERS[1])
    assert not doors.may_stand(one)
    two = with_all(one, VOTERS[2])
    assert doors.may_stand(two)
    assert not doors.may_stand(doors.go(two, VOTERS[2]))


def test_who_stands_and_is_not_answered_stands_again_under_another_lease() -> None:
    once = doors.stand(with_all(HEIR))
    assert doors.may_stand(once)
    twice = doors.stand(once)
    assert once.candidacy is not None
    assert twice.candidacy is not None
    assert (once.candidacy.lease, twice.candidacy.lease) == (2, 3)


def test_an_heir_is_elected_by_the_promises_of_a_majority_and_acts_when_they_have_noted_that() -> None:
    door = answered(doors.stand(with_all(HEIR)), VOTERS[1])
    assert door.head is None
    door = answered(door, VOTERS[2])
    assert door.head is not None
    assert (door.head.newest.order, door.head.newest.head, door.former) == ((2, 1), B, A.node)
    assert door.known == door.head.newest
    assert not door.acts
    assert not doors.may_stand(door)
    assert not noted_by(door, VOTERS[0]).acts
    assert noted_by(door, *VOTERS[:2]).acts


def test_a_head_that_is_elected_again_has_taken_nobodys_place() -> None:
    door = doors.stand(with_all(Door(place=A, known=NOW)))
    door = answered(answered(door, VOTERS[0]), VOTERS[1])
    assert door.head is not None
    assert door.former is None


def test_what_is_said_when_it_acts_changes_nothing() -> None:
    acting = noted_by(elected(), *VOTERS[:2])
    assert doors.hear_vote(acting, VOTERS[2], NOTED, granted=True) == acting


def test_who_is_promised_away_stands_again_and_never_under_the_same_lease() -> None:
    door = elected()
    away = Ballot(promised=9, promised_to=C.copy, noted=NOW)
    refused = doors.hear_vote(door, VOTERS[0], away, granted=False)
    assert (refused.head, refused.candidacy) == (None, None)
    late = Ballot(promised=2, promised_to=B.copy, noted=NOW)
    assert doors.hear_vote(refused, VOTERS[2], late, granted=True).head is None, "its lease is used up"
    assert doors.may_stand(refused)
    again = doors.stand(refused)
    assert again.candidacy is not None
    assert again.candidacy.lease == 10


def test_who_has_not_noted_it_yet_does_not_refuse_it() -> None:
    door = elected()
    assert doors.hear_vote(door, VOTERS[0], Ballot(promised=2, promised_to=B.copy, noted=NOW), granted=True) == door


def test_a_lease_is_higher_than_all_that_was_heard_of() -> None:
    high = Ballot(promised=7, promised_to=C.copy, noted=NOW)
    heard = doors.hear_vote(with_all(HEIR), VOTERS[0], high, granted=False)
    assert heard.candidacy is None
    standing = doors.stand(heard)
    assert standing.candidacy is not None
    assert standing.candidacy.lease == 8
    assert doors.stand(with_all(Door(place=A, known=NOW, heard=4))).heard == 5


def test_an_heir_that_a_newer_succession_goes_without_is_excluded() -> None:
    newer = msgspec.structs.replace(NOW, version=4, heirs=(C,))
    settled = Ballot(promised=1, promised_to=A.copy, noted=newer)
    door = answered(answered(doors.stand(with_all(HEIR)), VOTERS[0], settled), VOTERS[2])
    assert door.excluded == newer
    assert not doors.may_stand(door)


def test_an_heir_learns_of_other_voters_from_the_head() -> None:
    more = msgspec.structs.replace(NOW, version=4, voters=(*VOTERS, VoterId("d.0"), VoterId("e.0")))
    assert not doors.may_stand(with_all(doors.learn(HEIR, more), *VOTERS[:2]))
    assert doors.may_stand(with_all(doors.learn(HEIR, more)))


def test_what_voters_have_noted_counts_though_its_copy_lacks_that() -> None:
    """The head was lost before its last proposal had come here, and a voter is lost that it went without."""
    fewer = msgspec.structs.replace(NOW, version=4, voters=VOTERS[1:])
    one = doors.hear_vote(with_all(HEIR, VOTERS[1]), VOTERS[1], Ballot(1, A.copy, fewer), granted=False)
    assert one.known == fewer
    assert not doors.may_stand(one)
    assert doors.may_stand(doors.come(one, VOTERS[2]))
    assert doors.hear_vote(one, VOTERS[0], NOTED, granted=False).known == fewer, "that is older"
    assert doors.learn(one, NOW).known == fewer


def test_what_is_known_to_be_settled_counts_for_more() -> None:
    proposed = msgspec.structs.replace(NOW, version=4, base=NOW)
    settled = msgspec.structs.replace(NOW, version=4)
    door = doors.learn(HEIR, proposed)
    assert doors.learn_from(door, Ballot(1, A.copy, settled)).known == settled
    assert doors.learn_from(door, Ballot(1, A.copy, proposed)).known == proposed


def test_an_answer_to_a_head_tells_of_no_succession() -> None:
    """It goes without the voters: who took it for all there is would need nobody's promise."""
    door = elected()
    away = Ballot(promised=9, promised_to=C.copy, noted=NOW)
    refused = doors.hear_vote(door, VOTERS[0], away, granted=False)
    assert door.head is not None
    late = in_short(note(NOTED, door.head.newest)[0])
    assert doors.hear_vote(refused, VOTERS[1], late, granted=True).known == door.head.newest
    assert doors.learn_from(HEIR, in_short(Ballot(9, C.copy, msgspec.structs.replace(NOW, lease=9)))) == HEIR


def test_it_gives_way_to_a_higher_lease_than_that_of_its_copy_or_its_own() -> None:
    door = msgspec.structs.replace(HEIR, under=1)
    assert not doors.gives_way_to(door, 1)
    assert doors.gives_way_to(door, 2)
    assert doors.gives_way_to(doors.learn_from(door, Ballot(2, C.copy, msgspec.structs.replace(NOW, lease=2))), 2)
    assert not doors.gives_way_to(elected(), 2)
    assert doors.gives_way_to(elected(), 3)


def test_voters_of_what_is_followed_are_enough_to_stand() -> None:
    """The last words of a head that is lost: nobody has noted them, and nobody may ever."""
    others = tuple(VoterId(f"{name}.0") for name in "cdefg")
    moved = msgspec.structs.replace(NOW, version=4, voters=others, base=NOW)
    door = with_all(doors.learn(HEIR, moved), *VOTERS[:2])
    assert doors.may_stand(door)
    door = answered(answered(doors.stand(door), VOTERS[0]), VOTERS[1])
    assert door.head is not None, "two of three will never note it"
    assert door.head.settled == NOW
    alone = with_all(
        doors.learn(HEIR, msgspec.structs.replace(NOW, version=4, heirs=(), voters=(), base=NOW)), VOTERS[0]
    )
    assert not doors.may_stand(alone)


def test_where_there_are_no_voters_only_the_head_acts_again() -> None:
    alone = Succession(lease=1, version=0, head=A)
    assert doors.may_stand(Door(place=A, known=alone))
    assert not doors.may_stand(Door(place=B, known=alone))


def test_nothing_has_come_of_it_as_long_as_nobody_answers() -> None:
    door = doors.stand(with_all(HEIR))
    assert door.candidacy is not None
    assert judge_candidacy(door.candidacy) == Waiting()
    assert doors.judge(door) == door


def test_others_may_be_head_by_what_may_be_settled_and_by_what_it_follows() -> None:
    taken = Succession(lease=2, version=1, head=B, heirs=(D,), base=NOW)
    assert others_in(taken, B.copy) == [D, A, C]
    assert others_in(NOW, A.copy) == [B, C]


# ---------------------------------------------------------------- where agents look


def places_of(search: Search, noted: Succession, now_ms: int, count: int) -> list[str]:
    seen = []
    for _ in range(count):
        search, url = searching.look(search, noted, now_ms)
        seen.append(url)
    return seen


def test_the_head_is_looked_for_where_it_was_and_then_at_each_heir_in_turn_with_it() -> None:
    search, url = searching.look(Search(), NOW, 1_000)
    assert (url, search.away_since_ms) == (A.url, 1_000)
    assert places_of(search, NOW, 1_000 + PATIENCE_MS - 1, 3) == [A.url] * 3
    assert places_of(search, NOW, 1_000 + PATIENCE_MS, 5) == [B.url, A.url, C.url, A.url, B.url]


def test_a_head_from_which_nothing_comes_back_is_tried_twice() -> None:
    search, _ = searching.look(Search(), NOW, 0)
    search = searching.hear_nothing(search)
    assert places_of(search, NOW, 0, 1) == [A.url]
    assert places_of(searching.hear_nothing(search), NOW, 0, 1) == [B.url]


def test_what_is_known_at_a_door_tells_of_newer_ones() -> None:
    taken = Succession(lease=3, version=2, head=C, heirs=(D,), voters=VOTERS)
    search = searching.hear_known(searching.hear_nothing(searching.hear_nothing(Search())), NOW, taken)
    assert searching.hear_known(search, NOW, NOW) == search, "it is older"
    assert places_of(search, NOW, 0, 2) == [C.url, C.url], "with the patience that the former head had"
    search = searching.hear_nothing(searching.hear_nothing(search))
    assert places_of(search, NOW, 0, 6) == [D.url, C.url, B.url, C.url, A.url, C.url]


def test_a_head_that_gives_way_tells_who_acts_and_is_not_tried_again() -> None:
    """It has ended: nobody listens there, and to find that out takes no time. To wait for its restart would."""
    by = Succession(lease=NOW.lease + 1, version=0, head=C)
    search = searching.hear_known(Search(), NOW, by)
    assert places_of(search, NOW, 0, 1) == [C.url]
    assert searching.hear_known(search, None, NOW).told == by
    assert searching.hear_known(Search(), None, by) == Search(told=by), "nothing is noted, and the rest is not known"


def test_what_is_told_of_the_same_head_leaves_the_search_as_it_is() -> None:
    search, _ = searching.look(searching.hear_nothing(Search()), NOW, 7)
    newer = msgspec.structs.replace(NOW, version=NOW.version + 1)
    assert searching.hear_known(search, NOW, newer) == msgspec.structs.replace(search, told=newer)
    nowhere = msgspec.structs.replace(newer, lease=9, head=Place(C.node, C.copy))
    assert places_of(searching.hear_known(search, NOW, nowhere), NOW, 8, 1) == [A.url]


def test_who_has_noted_nothing_goes_where_it_was_told() -> None:
    assert searching.look(Search(), None, 0) == (Search(), "")
    nowhere = Succession(lease=1, version=0, head=Place(A.node, A.copy))
    assert searching.look(Search(), nowhere, 0) == (Search(), "")


def test_a_head_that_nobody_can_take_the_place_of_is_looked_for_for_ever() -> None:
    alone = msgspec.structs.replace(NOW, heirs=())
    search, _ = searching.look(Search(), alone, 0)
    assert places_of(search, alone, PATIENCE_MS, 3) == [A.url] * 3
    assert not searching.may_move(alone)
    assert not searching.may_move(None)
    assert searching.may_move(msgspec.structs.replace(alone, version=4, base=NOW))


def test_a_handshake_may_take_the_longer_the_more_come() -> None:
    many = msgspec.structs.replace(NOW, voters=tuple(VoterId(f"{number}.0") for number in range(900)))
    assert (searching.answer_ms(NOW), searching.answer_ms(many)) == (1_030, 5_000)
    assert searching.answer_ms(None) == searching.answer_ms(msgspec.structs.replace(NOW, heirs=())) == 5_000


def test_all_wait_alike_in_the_first_round_and_each_for_its_own_time_later() -> None:
    first, later = Search(tried=3), Search(tried=4)
    assert [searching.door_ms(first, NOW, B.url, chance) for chance in (0.0, 1.0)] == [DOOR_MS] * 2
    assert [searching.door_ms(later, NOW, C.url, chance) for chance in (0.0, 1.0)] == [DOOR_MS // 2, DOOR_MS * 3 // 2]


def test_the_longest_wait_is_at_the_first_of_the_heirs() -> None:
    waits = [searching.door_ms(Search(tried=4 * rounds), NOW, B.url, 0.5) for rounds in range(3)]
    assert waits == [DOOR_MS, 2 * DOOR_MS, 2 * DOOR_MS]
    assert searching.door_ms(Search(tried=40), NOW, A.url, 0.5) == DOOR_MS
    assert searching.door_ms(Search(), None, A.url, 0.5) == DOOR_MS
    assert searching.door_ms(Search(tried=2), msgspec.structs.replace(NOW, heirs=()), A.url, 0.5) == DOOR_MS


def test_a_voter_that_has_noted_nothing_tells_nothing_new() -> None:
    assert doors.hear_vote(HEIR, VOTERS[0], Ballot(), granted=False) == HEIR


def test_the_first_voters_are_learned_of_though_what_they_follow_had_none() -> None:
    alone = Succession(lease=1, version=3, head=A)
    proposed = Succession(lease=1, version=4, head=A, heirs=(B,), voters=VOTERS, base=alone)
    noted = Ballot(promised=1, promised_to=A.copy, noted=proposed)
    door = doors.hear_vote(Door(place=B, known=alone), VOTERS[0], noted, granted=False)
    assert door.known == proposed


def test_what_is_older_and_settled_does_not_take_the_place_of_a_proposal() -> None:
    proposed = Succession(lease=1, version=4, head=A, heirs=(B,), voters=VOTERS, base=NOW)
    door = Door(place=B, known=proposed)
    assert doors.hear_vote(door, VOTERS[0], NOTED, granted=False).known == proposed
