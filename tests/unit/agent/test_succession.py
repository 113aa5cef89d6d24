"""An agent's part when the head is lost: what it promises is on its disk, and it looks for the head where it may be."""

from __future__ import annotations

from pathlib import Path

import msgspec

from torchrelay.agent.allegiance import BALLOT, Voting, Whereabouts
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.succession.search import PATIENCE_MS
from torchrelay.protocol.succession.succession import CopyId, Place, Succession, VoterId
from torchrelay.wire.messages.channel import Ask, Note

NODE = NodeId("m2")
HEAD, FIRST, SECOND = (Place(NodeId(name), CopyId(f"copy-{name}"), f"https://{name}:1") for name in ("m1", "m3", "m4"))


def proposed(lease: int = 1, version: int = 1, *heirs: Place, head: Place = HEAD) -> Succession:
    return Succession(lease=lease, version=version, head=head, heirs=heirs)


def test_what_is_noted_is_known_to_the_next_agent_of_the_node(tmp_path: Path) -> None:
    voting = Voting(tmp_path, NODE)
    vote = voting.hear(Note(proposed(1, 1, FIRST)))
    assert vote.granted
    again = Voting(tmp_path, NODE)
    assert (again.voter, again.noted) == (voting.voter, proposed(1, 1, FIRST))


def test_a_promise_outlives_the_agent(tmp_path: Path) -> None:
    assert Voting(tmp_path, NODE).hear(Ask(5, FIRST.copy)).granted
    late = Voting(tmp_path, NODE).hear(Note(proposed(4, 9)))
    assert not late.granted
    assert late.ballot.noted is None


def test_a_node_without_its_memory_is_another_voter(tmp_path: Path) -> None:
    before = Voting(tmp_path, NODE).voter
    (tmp_path / BALLOT).unlink()
    assert Voting(tmp_path, NODE).voter != before
    (tmp_path / BALLOT).write_bytes(b"torn")
    assert Voting(tmp_path, NODE).voter != before


def test_what_cannot_be_written_is_not_promised(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    folder.mkdir()
    voting = Voting(folder, NODE)
    (folder / BALLOT).unlink()
    (folder / BALLOT).mkdir()  # nothing can take its place
    vote = voting.hear(Ask(5, FIRST.copy))
    assert not vote.granted
    assert vote.ballot.promised == 0


class Looking:
    """A clock, what was noted, and where is looked for the head."""

    def __init__(self, noted: Succession | None) -> None:
        self.now_s = 100.0
        self.noted = noted
        self.where = Whereabouts(lambda: "https://given:1", lambda: self.noted, lambda: self.now_s)


def test_who_knows_of_no_heir_goes_where_the_head_was() -> None:
    looking = Looking(None)
    assert looking.where.next() == "https://given:1"
    looking.noted = proposed(3, 1)
    looking.now_s += 1000
    assert [looking.where.next() for _ in range(3)] == [HEAD.url] * 3
    assert not looking.where.may_move


def test_a_head_that_has_ended_is_waited_for_and_then_heirs_are_tried_in_turn_with_it() -> None:
    looking = Looking(proposed(1, 1, FIRST, SECOND))
    assert looking.where.may_move
    assert [looking.where.next() for _ in range(3)] == [HEAD.url] * 3
    looking.now_s += PATIENCE_MS / 1000
    assert [looking.where.next() for _ in range(5)] == [FIRST.url, HEAD.url, SECOND.url, HEAD.url, FIRST.url]


def test_a_head_whose_machine_is_silent_is_not_waited_for() -> None:
    looking = Looking(proposed(1, 1, FIRST))
    assert looking.where.next() == HEAD.url
    looking.where.silent()
    assert looking.where.next() == HEAD.url, "once may be chance"
    looking.where.silent()
    assert looking.where.next() == FIRST.url


def test_whoever_was_before_a_head_that_nobody_may_have_settled_is_tried_as_well() -> None:
    taken = Succession(lease=2, version=1, head=FIRST, base=proposed(1, 1, FIRST, SECOND))
    looking = Looking(taken)
    assert looking.where.may_move
    looking.where.next()
    looking.now_s += PATIENCE_MS / 1000
    assert {looking.where.next() for _ in range(8)} == {HEAD.url, FIRST.url, SECOND.url}


def test_a_handshake_may_take_longer_where_more_agents_come_at_once() -> None:
    few = Looking(msgspec.structs.replace(proposed(1, 1, FIRST), voters=tuple(map(VoterId, "abc"))))
    many = Looking(msgspec.structs.replace(proposed(1, 1, FIRST), voters=tuple(VoterId(str(n)) for n in range(200))))
    assert 1 < few.where.handshake_s < 1.1
    assert many.where.handshake_s == 3
    assert Looking(None).where.handshake_s == 5


def test_one_that_is_found_is_waited_for_when_it_ends_later() -> None:
    looking = Looking(proposed(1, 1, FIRST))
    looking.where.next()
    for _ in range(2):
        looking.where.silent()
        looking.where.next()
    looking.where.found()
    looking.noted = proposed(2, 1, SECOND, head=FIRST)
    looking.now_s += 1000
    assert looking.where.next() == FIRST.url
    assert looking.where.here == FIRST.url
