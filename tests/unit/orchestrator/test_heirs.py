"""What a head does for its own loss: nothing leaves before all heirs have what it follows from, and voters decide."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from torchrelay.orchestrator.core.clock import UNSAID, Clock
from torchrelay.orchestrator.core.heirs import AGAIN_S, COME_S, IN_VAIN_S, REFUSED_S, SLOW_S, Heirs
from torchrelay.orchestrator.core.watch import mind_what_waits
from torchrelay.orchestrator.store.journal import Journal, JournalUnavailable, Superseded
from torchrelay.orchestrator.store.parts import Copy, Row, asked_before, note_asked, own_copy
from torchrelay.protocol.messages.events import NodeJoined, NodeLost, Tick
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.model.state import Cluster
from torchrelay.protocol.rules.cluster import EMPTY, advance
from torchrelay.protocol.succession.head import first
from torchrelay.protocol.succession.succession import CopyId, Place, Succession, VoterId
from torchrelay.protocol.succession.voter import Ballot
from torchrelay.wire.messages.channel import Appoint, Note, ToAgent, Vote
from torchrelay.wire.messages.inheritance import Part

NAMES = ("m1", "m2", "m3", "m4")
HEAD = Place(NodeId("m1"), CopyId("first"), "https://m1:1")


class Agent:
    """The way to an agent, which keeps what it is sent."""

    def __init__(self, node: str) -> None:
        self.node, self.incarnation, self.voter = NodeId(node), "1", VoterId(f"{node}.0")
        self.sent: list[ToAgent] = []

    def send(self, message: ToAgent) -> None:
        self.sent.append(message)

    def close(self, reason: str) -> None:
        raise AssertionError(reason)

    def noted(self) -> Succession:
        """What it was asked to note last."""
        return next(message.succession for message in reversed(self.sent) if isinstance(message, Note))


class Port:
    """The way to an heir, which keeps what it is sent."""

    def __init__(self, node: str, copy: CopyId) -> None:
        self.place = Place(NodeId(node), copy, f"https://{node}:2")
        self.sent: list[Part] = []
        self.closed = ""

    def send(self, message: Part) -> None:
        self.sent.append(message)

    def close(self, reason: str) -> None:
        self.closed = reason


class Office:
    """A head with four agents, of whose nodes its own is one."""

    def __init__(self, folder: Path, names: tuple[str, ...] = NAMES) -> None:
        self.journal = Journal(folder / "journal.db")
        self.now_s = 100.0
        self.heirs = Heirs(first(HEAD, self.journal.lease), self.journal, node=HEAD.node, now_s=lambda: self.now_s)
        self.agents = {NodeId(name): Agent(name) for name in names}
        self.cluster: Cluster = EMPTY
        for name in names:
            self.hear(NodeJoined(node=NodeId(name), incarnation="1", slots=1))
        self.ports: list[Port] = []

    def hear(self, event: NodeJoined | NodeLost) -> None:
        self.cluster = advance(self.cluster, event, 0)

    def mind(self) -> None:
        self.heirs.mind(self.cluster, self.agents)

    def vote(self, *names: str) -> None:
        """These note what they were asked to."""
        for name in names:
            agent = self.agents[NodeId(name)]
            ballot = Ballot(promised=self.journal.lease, promised_to=HEAD.copy, noted=agent.noted())
            self.heirs.hear_vote(Vote(voter=agent.voter, granted=True, ballot=ballot))

    def appointed(self) -> list[tuple[str, Appoint]]:
        return [
            (node, message)
            for node, agent in self.agents.items()
            for message in agent.sent
            if isinstance(message, Appoint)
        ]

    def inherit(self) -> list[Port]:
        """All that were appointed come, and have the whole journal."""
        for node, order in self.appointed():
            if not self.heirs.known(NodeId(node), order.copy, order.key):
                continue
            port = Port(node, order.copy)
            self.heirs.join(port, self.journal.part, order.key)
            self.heirs.hear_held(port, self.journal.part)
            self.ports.append(port)
        return self.ports

    def settled(self) -> list[str]:
        """With two heirs, and all voters."""
        self.mind()
        self.vote("m1", "m2", "m3")
        ports = self.inherit()
        for _ in ports:
            if self.heirs.head.proposed is not None:
                self.vote("m1", "m2", "m3")
        self.hold()
        return [place.node for place in self.heirs.head.settled.heirs]

    def hold(self, *ports: Port) -> None:
        for port in ports or self.ports:
            self.heirs.hear_held(port, self.journal.part)


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    found = Office(tmp_path)
    with closing(found.journal):
        yield found


def test_two_nodes_have_nobody_to_decide_between_them(tmp_path: Path) -> None:
    office = Office(tmp_path, ("m1", "m2"))
    with closing(office.journal):
        office.mind()
        left: list[int] = []
        office.journal.append(Tick(), 1)
        office.heirs.when_safe(lambda: left.append(1))
        assert left == [1]
        assert [agent.sent for agent in office.agents.values()] == [[], []]


def test_all_nodes_vote_and_two_others_than_the_heads_keep_copies(office: Office) -> None:
    assert office.settled() == ["m2", "m3"]
    assert office.heirs.head.settled.voters == ("m1.0", "m2.0", "m3.0", "m4.0")
    told = [message for message in office.agents[NodeId("m4")].sent if isinstance(message, Note)][-1]
    assert told.succession == office.heirs.head.settled
    assert told.succession.base is None


def test_voters_are_in_the_journal_before_anybody_is_asked(office: Office) -> None:
    office.mind()
    kept = office.journal.succession()
    assert kept is not None
    assert kept == office.agents[NodeId("m2")].noted()
    assert kept.base is not None


def test_nothing_is_settled_by_half_of_them(office: Office) -> None:
    office.mind()
    office.vote("m1", "m2")
    assert office.heirs.head.proposed is not None
    office.vote("m2")
    assert office.heirs.head.proposed is not None, "one vote counts once"
    office.vote("m4")
    assert office.heirs.head.proposed is None


def test_a_proposal_is_repeated_to_those_alone_that_have_not_answered(office: Office) -> None:
    office.mind()
    office.vote("m1")
    refused = office.agents[NodeId("m2")]
    ballot = Ballot(promised=office.journal.lease + 1, promised_to=CopyId("another"))
    office.heirs.hear_vote(Vote(voter=refused.voter, granted=False, ballot=ballot))
    before = {node: len(agent.sent) for node, agent in office.agents.items()}
    office.mind()
    assert {node: len(agent.sent) for node, agent in office.agents.items()} == before, "it is too early"
    office.now_s += AGAIN_S
    office.mind()
    more = {node: len(agent.sent) - before[node] for node, agent in office.agents.items()}
    assert more == {"m1": 0, "m2": 0, "m3": 1, "m4": 1}
    office.vote("m3", "m4")
    assert office.heirs.head.proposed is None
    assert all(agent.noted().base is None for agent in office.agents.values()), "all hear that it is settled"


def test_what_follows_from_a_part_leaves_when_both_heirs_have_it_and_in_order(office: Office) -> None:
    office.settled()
    one, two = office.ports
    left: list[int] = []
    for number in (1, 2):
        office.journal.append(Tick(), number)
        office.heirs.when_safe(lambda number=number: left.append(number))  # type: ignore[misc]
    assert left == []
    office.heirs.hear_held(one, office.journal.part)
    assert left == []
    office.heirs.hear_held(two, office.journal.part - 1)
    assert left == [1]
    office.heirs.hear_held(two, office.journal.part)
    assert left == [1, 2]
    assert [part.number for part in two.sent][-2:] == [office.journal.part - 1, office.journal.part]
    assert one.sent[-2:] == two.sent[-2:]


def test_time_stands_still_while_anything_waits_for_heirs(office: Office) -> None:
    assert office.settled()
    clock = Clock(1_000, lambda: round(office.now_s * 1e9))

    def passed_ms(by_s: float) -> int:
        before_ms = clock.now_ms()
        office.now_s += by_s
        mind_what_waits(office.heirs, clock)
        return clock.now_ms() - before_ms

    office.journal.append(Tick(), 1)
    assert passed_ms(0.5) == 500, "nothing is to leave"
    office.heirs.when_safe(lambda: None)
    assert passed_ms(0.2) == 200, "copies take a moment"
    assert passed_ms(0.2) == 200
    assert passed_ms(5.0) == 0
    office.hold()
    assert passed_ms(0.1) == 0
    assert passed_ms(0.5) == 500
    assert clock.left_out_ms() == 5_100


def test_a_clock_that_is_held_for_two_reasons_goes_on_when_both_are_over() -> None:
    now_s = [10.0]
    clock = Clock(0, lambda: round(now_s[0] * 1e9))
    clock.hold()
    clock.hold(UNSAID)
    now_s[0] += 1
    clock.release()
    assert clock.held
    now_s[0] += 1
    clock.release(UNSAID)
    assert (clock.held, clock.now_ms(), clock.left_out_ms()) == (False, 0, 2_000)


def test_an_heir_that_is_lost_is_done_without_when_a_majority_has_noted_that(office: Office) -> None:
    office.settled()
    left: list[int] = []
    office.journal.append(Tick(), 1)
    office.heirs.when_safe(lambda: left.append(1))
    office.heirs.leave(office.ports[0])
    office.hold(office.ports[1])
    assert left == []
    office.vote("m1", "m4")
    assert left == []
    office.vote("m3")
    office.hold(office.ports[1])
    assert left == [1]
    assert [place.node for place in office.heirs.head.settled.heirs] == ["m3"]


def test_another_node_takes_its_place(office: Office) -> None:
    office.settled()
    office.heirs.leave(office.ports[0])
    office.vote("m1", "m3", "m4")
    assert [node for node, _ in office.appointed()] == ["m2", "m3", "m4"], "the one that was just lost is not the first"


def test_an_heir_that_takes_too_long_is_done_without(office: Office) -> None:
    office.settled()
    office.journal.append(Tick(), 1)
    office.hold(office.ports[1])
    office.now_s += SLOW_S / 2
    office.mind()
    assert office.ports[0].closed == ""
    office.now_s += SLOW_S
    office.mind()
    assert office.ports[0].closed != ""
    assert office.ports[1].closed == ""
    assert office.heirs.head.proposed is not None


def test_one_that_was_appointed_and_does_not_come_is_passed_over(office: Office) -> None:
    office.mind()
    office.vote("m1", "m2", "m3")
    (_, stale), *_ = office.appointed()
    office.now_s += COME_S + 1
    office.mind()
    assert "m4" in [node for node, _ in office.appointed()]
    assert not office.heirs.known(NodeId("m2"), stale.copy, stale.key)


def test_a_key_opens_for_its_own_node_and_once(office: Office) -> None:
    office.mind()
    office.vote("m1", "m2", "m3")
    (node, order), *_ = office.appointed()
    assert not office.heirs.known(NodeId("m4"), order.copy, order.key)
    assert not office.heirs.known(NodeId(node), order.copy, order.key[:-1] + "x")
    assert office.heirs.known(NodeId(node), order.copy, order.key)
    office.heirs.join(Port(node, order.copy), office.journal.part, order.key)
    assert not office.heirs.known(NodeId(node), order.copy, order.key)


def test_a_lost_node_votes_no_more(office: Office) -> None:
    office.settled()
    del office.agents[NodeId("m4")]
    office.mind()
    assert "m4.0" in office.heirs.head.newest.voters, "it is away, and may come back"
    office.hear(NodeLost(node=NodeId("m4"), incarnation="1", reason="silent"))
    office.mind()
    assert office.heirs.head.newest.voters == ("m1.0", "m2.0", "m3.0")
    assert office.heirs.head.newest.groups == (("m1.0", "m2.0", "m3.0"), ("m1.0", "m2.0", "m3.0", "m4.0"))


def test_who_is_promised_away_by_a_majority_is_head_no_more(office: Office) -> None:
    office.settled()
    office.heirs.leave(office.ports[0])
    for name in ("m2", "m3"):
        ballot = Ballot(promised=9, promised_to=CopyId("other"), noted=office.heirs.head.settled)
        office.heirs.hear_vote(Vote(voter=VoterId(f"{name}.0"), granted=False, ballot=ballot))
        assert bool(office.heirs.stuck) is (name == "m3"), "of four, two are enough to keep the others from a majority"
    with pytest.raises(Superseded, match="lease 9"):
        office.mind()


def test_a_head_that_is_refused_and_not_answered_by_the_others_asks_for_another_lease(office: Office) -> None:
    office.mind()
    away = Ballot(promised=office.journal.lease + 1, promised_to=CopyId("other"))
    office.heirs.hear_vote(Vote(voter=VoterId("m1.0"), granted=False, ballot=away))
    office.now_s += REFUSED_S
    office.mind()
    assert not office.heirs.stuck, "three others may answer yet"
    office.now_s += 0.1
    with pytest.raises(Superseded):
        office.mind()
    assert office.heirs.stuck


def test_a_head_that_nothing_leaves_any_more_is_none(office: Office) -> None:
    assert office.settled()
    for port in office.ports:
        office.heirs.leave(port)
    office.now_s += 2 * IN_VAIN_S
    office.mind()  # nothing is to leave
    office.journal.append(Tick(), 1)
    office.heirs.when_safe(lambda: None)
    office.now_s += IN_VAIN_S
    office.mind()
    office.now_s += 0.1
    with pytest.raises(Superseded, match="nothing has left"):
        office.mind()


def test_what_cannot_be_written_is_proposed_to_nobody(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Succession) -> None:
        raise JournalUnavailable("full")

    monkeypatch.setattr(office.journal, "keep_succession", full)
    for _ in range(2):
        with pytest.raises(JournalUnavailable):
            office.mind()
    assert [agent.sent for agent in office.agents.values()] == [[], [], [], []]


def test_a_head_that_ends_changes_nothing_any_more(office: Office) -> None:
    office.settled()
    before = office.journal.succession()
    office.heirs.over = True
    office.heirs.leave(office.ports[0])
    assert office.journal.succession() == before


def test_a_node_of_this_machine_keeps_no_copy(office: Office) -> None:
    office.heirs.own.add(NodeId("m2"))
    assert office.settled() == ["m3", "m4"]


class TestCopies:
    """A copy of the journal that lies elsewhere."""

    def test_a_copy_has_what_the_journal_has_and_is_a_journal(self, tmp_path: Path) -> None:
        with closing(Journal(tmp_path / "a.db")) as journal:
            journal.append(Tick(), 1)
            journal.anchor(1, 2)
            copy = Copy(tmp_path / "b.db", journal.whole(), journal.part)
            journal.on_part = copy.write
            journal.append_all([Tick(), Tick()], 2)
            journal.append(Tick(), 3)
            secret = journal.secret()
            copy.close()
            journal.on_part = None
            entries, name = list(journal.entries()), journal.name
        with closing(Journal(tmp_path / "b.db", name=name, lease=7)) as heir:
            assert list(heir.entries()) == entries
            assert (heir.lease, heir.secret(), heir.name) == (7, secret, name)

    def test_a_lease_that_is_over_opens_nothing(self, tmp_path: Path) -> None:
        with closing(Journal(tmp_path / "a.db", lease=7)):
            pass
        with pytest.raises(Superseded, match="lease 7"):
            Journal(tmp_path / "a.db", lease=7)

    @pytest.mark.parametrize(
        ("part", "row"),
        [
            (2, Row("event", (1, 1, b"", 0))),
            (1, Row("anything", (1,))),
            (1, Row("about", ("name", None))),  # type: ignore[arg-type]
        ],
    )
    def test_what_is_no_next_part_is_refused(self, tmp_path: Path, part: int, row: Row) -> None:
        with closing(Journal(tmp_path / "a.db")) as journal:
            copy = Copy(tmp_path / "b.db", journal.whole(), 0)
        with closing(copy), pytest.raises(ValueError, match="journal"):
            copy.write(part, (row,))

    def test_a_copy_goes_by_another_name_after_a_start_of_the_machine(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        boot = tmp_path / "boot"
        boot.write_text("one\n")
        monkeypatch.setattr("torchrelay.orchestrator.store.parts.BOOT", boot)
        name = own_copy(tmp_path)
        assert own_copy(tmp_path) == name
        boot.write_text("two\n")
        assert own_copy(tmp_path) != name

    def test_a_lease_that_was_asked_for_is_known_to_the_next_process(self, tmp_path: Path) -> None:
        assert asked_before(tmp_path) == 0
        note_asked(tmp_path, 7)
        assert asked_before(tmp_path) == 7
