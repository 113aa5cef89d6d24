"""Paths at fault: when one is found to be, whose fault it is said to be, and when it is over."""

from __future__ import annotations

import msgspec
import pytest

from tests.support.network_world import SECOND, A, B, C, World, local_of, one_peer, two_peers
from torchrelay.agent.network.findings import Finding, Judge, Kind, Memory, Where, higher, span_in_words, to_whom
from torchrelay.wire.files.launch import PathLimits

FIRST = local_of(0)
HOUR_S = 3600.0


def found(world: World, path: int = 0) -> Finding:
    finding = world.finding(path)
    assert finding is not None
    return finding


def flap(world: World, times: int, remote: str = A, reason: str = "silent", apart_s: float = 10.0) -> None:
    """The first path to a peer is lost for a second, again and again."""
    for _ in range(times):
        world.lose(remote=remote, reason=reason)
        world.wait(1)
        world.heal(remote=remote)
        world.wait(apart_s - 1)


class TestDown:
    def test_a_path_lost_to_all_its_peers_is_found_after_its_time_and_not_before(self) -> None:
        world = two_peers()
        for remote in (A, B):
            world.lose(remote=remote)
        world.wait(29.5)
        assert world.judge.findings == {}
        world.wait(0.5)
        assert (found(world).kind, found(world).where, world.ours) == (Kind.DOWN, Where.HERE, [FIRST])
        assert found(world).evidence == (
            f"path eth0 (10.0.1.1) lost for 30 s (silent), to all 2 peers ({A}, {B}): "
            "the interface of this node or its link"
        )
        assert found(world).everyone
        assert found(world).pids == (1,)

    def test_lost_to_one_peer_of_several_it_is_the_far_end(self) -> None:
        world = two_peers()
        world.lose(remote=A)
        world.wait(100)
        assert (found(world).where, found(world).remotes, world.ours) == (Where.THERE, (A,), [])
        assert f"to {A} only, 1 of 2 peers: the far end or the way there" in found(world).evidence

    def test_lost_to_all_but_one_it_may_be_the_way_there(self) -> None:
        world = two_peers().use((1, 0, C))
        world.lose(remote=A)
        world.lose(remote=B)
        world.wait(100)
        assert (found(world).where, world.ours) == (Where.THERE, [])

    @pytest.mark.parametrize("reason", ["carrier", "address"])
    def test_what_the_kernel_says_of_our_interface_is_here_also_with_one_peer(self, reason: str) -> None:
        world = one_peer()
        world.lose(reason=reason)
        world.wait(30)
        assert (found(world).where, world.ours) == (Where.HERE, [FIRST])
        assert f"({reason})" in found(world).evidence

    def test_of_two_ends_that_cannot_be_told_apart_the_higher_one_leaves_and_later(self) -> None:
        lower = one_peer()
        higher_one = World().use((1, 0, "10.0.1.0"), (1, 1, "10.0.2.0"))
        lower.lose()
        higher_one.lose(remote="10.0.1.0")
        for world in (lower, higher_one):
            world.wait(59.5)
            assert (found(world).where, world.ours) == (Where.EITHER, [])
            world.wait(0.5)
        assert lower.ours == []
        assert higher_one.ours == [FIRST]
        assert "only peer" in found(higher_one).evidence
        lower.wait(1000)
        assert lower.ours == []

    def test_the_one_that_stayed_sees_its_next_peer_lost_too_if_it_was_the_wrong_one(self) -> None:
        world = one_peer()
        world.lose()
        world.wait(60)
        world.leave()
        world.leave(path=1)
        world.use((1, 0, B), (1, 1, B))
        world.links[1, 0, B].up, world.links[1, 0, B].lost_at = False, world.now
        world.wait(29)
        assert world.ours == []
        world.wait(2)
        assert (found(world).where, found(world).remotes, world.ours) == (Where.HERE, (A, B), [FIRST])

    def test_what_was_lost_before_something_came_over_the_path_tells_nothing_of_it(self) -> None:
        world = one_peer()
        world.lose()
        world.wait(60)
        world.leave()
        world.use((1, 0, B))
        world.wait(5)
        world.lose(remote=B)
        world.wait(35)
        assert (found(world).where, found(world).remotes, world.ours) == (Where.EITHER, (B,), [])

    def test_a_shorter_loss_begins_anew(self) -> None:
        world = two_peers()
        for _ in range(5):
            for remote in (A, B):
                world.lose(remote=remote)
            world.wait(25)
            for remote in (A, B):
                world.heal(remote=remote)
            world.wait(1)
        assert world.judge.findings == {}

    def test_it_is_over_when_the_path_has_been_whole_for_its_time(self) -> None:
        world = two_peers(heal_s=20)
        for remote in (A, B):
            world.lose(remote=remote)
        world.wait(40)
        for remote in (A, B):
            world.heal(remote=remote)
        world.wait(19.5)
        assert world.ours == [FIRST]
        for remote in (A, B):
            world.lose(remote=remote)
        world.wait(5)
        for remote in (A, B):
            world.heal(remote=remote)
        world.wait(19.5)
        assert world.ours == [FIRST], "it was lost in between"
        world.wait(1)
        assert world.judge.findings == {}

    def test_it_is_over_too_when_it_turns_out_to_be_the_far_end(self) -> None:
        world = two_peers(heal_s=20)
        for remote in (A, B):
            world.lose(remote=remote)
        world.wait(40)
        world.heal(remote=B)
        world.wait(19.5)
        assert world.ours == [FIRST]
        world.wait(1)
        assert (world.ours, found(world).where) == ([], Where.THERE)

    def test_its_evidence_stays_as_it_was_told(self) -> None:
        world = two_peers()
        for remote in (A, B):
            world.lose(remote=remote)
        world.wait(30)
        evidence = found(world).evidence
        world.wait(200)
        assert found(world).evidence == evidence

    def test_two_paths_are_found_each_for_itself(self) -> None:
        world = two_peers()
        for remote in (A, B):
            world.lose(path=1, remote=remote, reason="carrier")
        world.wait(20)
        for remote in (A, B):
            world.lose(path=0, remote=remote, reason="carrier")
        world.wait(10)
        assert world.ours == [SECOND]
        world.wait(20)
        assert world.ours == [FIRST, SECOND]

    def test_whether_all_use_the_path_is_told(self) -> None:
        world = World().use((1, 0, A), (2, 1, A), (1, 0, B))
        for remote in (A, B):
            world.lose(remote=remote)
        world.wait(30)
        assert (found(world).pids, found(world).everyone) == ((1,), False)


class TestUnused:
    """Ranks have moved away: nobody uses the path any more, and nobody sees it healed."""

    def left(self, **limits: float) -> World:
        world = two_peers(**limits)
        for remote in (A, B):
            world.lose(remote=remote, reason="carrier")
        world.wait(40)
        world.links.clear()
        world.judge.paths.ended(1, world.now)
        return world

    def test_it_stays_until_a_probe_gets_through_for_its_time(self) -> None:
        world = self.left(heal_s=10)
        world.wait(500)
        assert world.ours == [FIRST]
        assert list(world.judge.probes()) == [(FIRST, A), (FIRST, B)]
        world.judge.paths.probed((FIRST, A), False, world.now)
        world.judge.paths.probed((FIRST, B), True, world.now)
        world.wait(9.5)
        world.judge.paths.probed((FIRST, B), True, world.now)
        assert world.ours == [FIRST]
        world.wait(1)
        assert world.judge.findings == {}
        assert list(world.judge.probes()) == []

    def test_a_probe_that_fails_begins_it_anew(self) -> None:
        world = self.left(heal_s=10)
        world.judge.paths.probed((FIRST, B), True, world.now)
        world.wait(8)
        world.judge.paths.probed((FIRST, B), False, world.now)
        world.wait(8)
        assert world.ours == [FIRST]

    def test_whoever_uses_it_again_is_believed_more(self) -> None:
        world = self.left(heal_s=10)
        world.judge.paths.probed((FIRST, A), True, world.now)
        world.use((7, 0, A))
        world.lose(7, remote=A)
        world.wait(300)
        assert world.ours == [FIRST]
        assert list(world.judge.probes()) == []

    def test_nothing_is_probed_that_is_in_use_or_not_ours(self) -> None:
        world = two_peers()
        world.lose(remote=A)
        world.wait(40)
        assert found(world).where is Where.THERE
        world.links.clear()
        world.judge.paths.ended(1, world.now)
        assert list(world.judge.probes()) == []
        world.judge.paths.probed(("10.0.9.9", A), True, world.now)
        world.wait(1)
        assert world.judge.findings == {}, "there is no fault of the far end any more, where nobody asks it"

    def test_a_process_that_cannot_hear_its_peer_keeps_nobody_from_knocking(self) -> None:
        world = two_peers(heal_s=10)
        for remote in (A, B):
            world.lose(remote=remote, reason="silent")
        world.wait(40)
        world.report("peer_unreachable", remotes=(A,))
        world.report("peer_unreachable", remotes=(B,))
        world.wait(1)
        assert list(world.judge.probes()) == [(FIRST, A), (FIRST, B)]


class TestFlapping:
    def test_eight_in_an_hour_are_found_and_seven_are_not(self) -> None:
        world = two_peers()
        flap(world, 7, reason="carrier")
        assert world.judge.findings == {}
        flap(world, 1, reason="carrier")
        assert (found(world).kind, world.ours) == (Kind.FLAPPING, [FIRST])
        assert "lost 8 times within an hour" in found(world).evidence

    def test_eight_in_more_than_an_hour_are_not(self) -> None:
        world = two_peers()
        flap(world, 7, reason="carrier")
        world.now += HOUR_S - 60
        flap(world, 1, reason="carrier")
        assert world.judge.findings == {}

    def test_to_one_of_several_peers_it_is_the_far_end_and_to_all_it_is_here(self) -> None:
        world = two_peers()
        flap(world, 8)
        assert (found(world).where, world.ours) == (Where.THERE, [])
        flap(world, 4, remote=B)
        assert (found(world).where, world.ours) == (Where.HERE, [FIRST])

    def test_with_one_peer_the_higher_end_leaves_and_later(self) -> None:
        world = World().use((1, 0, "10.0.1.0"), (1, 1, "10.0.2.0"))
        flap(world, 11, remote="10.0.1.0")
        assert (found(world).where, world.ours) == (Where.EITHER, [])
        flap(world, 1, remote="10.0.1.0")
        assert world.ours == [FIRST]

    def test_it_is_over_when_the_hour_is_and_the_path_is_whole(self) -> None:
        world = two_peers(window_s=200, heal_s=30)
        flap(world, 8, reason="carrier")
        world.wait(115)
        assert world.ours == [FIRST]
        world.wait(40)
        assert world.judge.findings == {}

    def test_a_path_that_was_lost_for_long_and_flaps_is_found_once_and_its_kind_changes(self) -> None:
        world = two_peers()
        flap(world, 8, reason="carrier")
        world.lose(reason="carrier")
        world.lose(remote=B, reason="carrier")
        world.wait(30)
        assert (found(world).kind, world.ours) == (Kind.DOWN, [FIRST])


class TestMemory:
    def test_the_next_agent_goes_on_with_findings_and_flaps(self) -> None:
        world = two_peers(heal_s=20)
        flap(world, 7, remote=A, reason="carrier")
        for remote in (A, B):
            world.lose(path=1, remote=remote, reason="carrier")
        world.wait(30)
        memory = msgspec.json.decode(msgspec.json.encode(world.judge.memory()), type=Memory)
        world.judge = Judge(world.limits)
        world.judge.remember(memory, world.now)
        world.wait(1)
        assert world.ours == [SECOND]
        assert found(world, 1).evidence == memory.findings[0].evidence
        flap(world, 1, remote=A, reason="carrier")
        assert world.ours == [FIRST, SECOND]
        for remote in (A, B):
            world.heal(path=1, remote=remote)
        world.wait(21)
        assert world.ours == [FIRST]

    def test_what_is_told_of_a_time_to_come_is_not_believed(self) -> None:
        world = one_peer()
        world.judge.remember(Memory(flaps=((0, "eth0", FIRST, A, ((world.now + 5, "silent"),)),)), world.now)
        assert world.link().flaps == []


class TestWords:
    @pytest.mark.parametrize(
        ("local", "remote", "ours"),
        [
            ("10.0.0.10", "10.0.0.9", True),  # numbers, not letters
            ("10.0.0.9", "10.0.0.10", False),
            ("fd00::2", "fd00::1", True),
            ("node-b", "node-a", True),
        ],
    )
    def test_which_of_two_addresses_is_higher(self, local: str, remote: str, ours: bool) -> None:
        assert higher(local, remote) is ours
        assert higher(remote, local) is not ours

    @pytest.mark.parametrize(
        ("seconds", "text"), [(3600, "an hour"), (90, "90 s"), (600, "10 min"), (7200, "120 min"), (150, "150 s")]
    )
    def test_spans(self, seconds: float, text: str) -> None:
        assert span_in_words(seconds) == text

    def test_long_lists_are_cut(self) -> None:
        world = two_peers().use(*((1, 0, f"10.0.1.{number}") for number in range(10, 15)))
        links = world.judge.paths.of_path(FIRST)
        assert to_whom(links, len(links)) == "to all 7 peers (10.0.1.10, 10.0.1.11, 10.0.1.12, ...)"


def test_limits_are_those_that_were_given() -> None:
    assert PathLimits() == PathLimits(
        down_s=30, flaps=8, window_s=3600, slow_share=0.5, slow_s=60, heal_s=60, probe_port=9
    )
