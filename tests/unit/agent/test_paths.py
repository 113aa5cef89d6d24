"""What an agent makes of reports and pages: which links are lost, since when, and how often."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import network_world
from tests.support.network_world import A, B, World, local_of, one_peer, two_peers
from torchrelay.agent.network import paths as module
from torchrelay.agent.network.findings import Judge, tell_paths
from torchrelay.agent.network.paths import SAME_FLAP_S, STALE_S, LinkState
from torchrelay.wire.messages.channel import NetworkFrame
from torchrelay.wire.messages.codec import encode
from torchrelay.wire.messages.netreport import MAX_ROWS, NetPage, RowState


def flaps(world: World, path: int = 0, remote: str = A) -> int:
    return len(world.link(path, remote).flaps)


class TestTotals:
    def test_counters_that_nobody_can_have_do_not_grow_beyond_what_a_message_holds(self) -> None:
        world = World()
        for pid in range(1, 5):
            world.use((pid, 0, A))
            world.links[pid, 0, A].sent = 2**63 - 1
            world.wait(1)
        news = tell_paths(world.judge, world.now, lambda _: "")
        assert news.paths[0].links[0].sent_bytes == 2**63 - 1
        assert encode(NetworkFrame(news))


class TestAcrossARestart:
    def test_a_loss_that_the_agent_before_has_counted_is_not_counted_again_when_it_is_over(self) -> None:
        world = one_peer()
        world.lose()
        world.wait(10)
        memory = world.judge.memory()
        world.judge = Judge(world.limits)
        world.judge.remember(memory, world.now)
        assert flaps(world) == 1
        world.heal()
        assert flaps(world) == 1
        world.wait(5)
        world.report("path_up", outage_ms=2000)
        assert flaps(world) == 2, "this one nobody has told of"


class TestClocks:
    def test_a_clock_that_is_set_back_does_not_make_a_link_lost_for_as_long(self, monkeypatch: Any) -> None:
        world = two_peers()
        world.wait(1)
        world.lose()
        monkeypatch.setattr(network_world, "WALL_S", network_world.WALL_S - 3600)
        world.heal(told=False)
        world.wait(1)
        assert world.link().state is LinkState.UP

    def test_a_clock_that_is_set_forward_does_not_make_a_loss_long(self, monkeypatch: Any) -> None:
        world = two_peers()
        world.wait(1)
        for remote in (A, B):
            world.lose(remote=remote, told=False)
            world.links[1, 0, remote].lost_at -= 3600  # the date is by the clock as it was
        monkeypatch.setattr(network_world, "WALL_S", network_world.WALL_S + 3600)
        world.wait(1)
        assert world.link().state is LinkState.DOWN
        assert world.now - world.link().since <= 1
        assert world.ours == []


class TestNews:
    def test_a_path_that_processes_number_differently_is_told_once(self) -> None:
        world = two_peers()
        world.lose(remote=A)
        world.wait(40)
        world.judge.paths.links[local_of(0), B].path = 3
        news = tell_paths(world.judge, world.now, lambda _: "")
        assert [(path.path, path.local, len(path.links)) for path in news.paths if path.local == local_of(0)] == [
            (0, local_of(0), 2)
        ]
        assert [path.finding is not None for path in news.paths] == [True, False]


class TestStates:
    def test_a_page_alone_tells_of_all_links(self) -> None:
        world = two_peers()
        assert {link.state for link in world.judge.paths.links.values()} == {LinkState.UP}
        world.links[1, 0, A].suspect = True
        world.wait(0.5)
        assert world.link().state is LinkState.SUSPECT
        world.lose(told=False)
        world.wait(0.5)
        assert (world.link().state, world.link(1).state) == (LinkState.DOWN, LinkState.UP)
        assert world.link().since == world.now - 0.5, "the page says since when"

    def test_a_report_is_believed_at_once_and_an_older_page_changes_nothing(self) -> None:
        world = one_peer()
        old = world.page(1)
        world.now += 0.05
        world.lose()
        assert world.link().state is LinkState.DOWN
        before = NetPage(pid=1, rank=1, updated_us=old.updated_us + 40_000, rows=old.rows)
        world.judge.paths.looked(before, world.now)
        assert (world.link().state, flaps(world)) == (LinkState.DOWN, 1)
        world.wait(1)
        assert (world.link().state, flaps(world)) == (LinkState.DOWN, 1), "the page says the same: it is no second loss"
        world.heal()
        assert world.link().state is LinkState.UP

    def test_a_link_is_lost_only_when_all_who_use_it_have_lost_it(self) -> None:
        world = World().use((1, 0, A), (2, 0, A))
        world.lose(1)
        assert world.link().state is LinkState.UP
        world.wait(3)
        world.lose(2)
        assert (world.link().state, world.link().since) == (LinkState.DOWN, world.now)
        world.heal(1)
        assert world.link().state is LinkState.UP

    def test_what_is_not_in_the_page_any_more_is_not_used(self) -> None:
        world = two_peers()
        world.lose()
        world.wait(3)
        world.leave()
        world.wait(1)
        assert world.link().state is LinkState.UNUSED
        assert world.link(0, B).state is LinkState.UP

    def test_a_row_without_connections_that_is_not_lost_is_not_used(self) -> None:
        world = one_peer()
        world.links[1, 0, A].live = 0
        world.wait(0.5)
        assert world.link().state is LinkState.UNUSED

    def test_a_report_is_kept_until_the_page_has_had_time_to_tell_of_the_link(self) -> None:
        world = one_peer()
        world.report("path_down", remote=B, reason="silent")
        world.wait(1)
        assert world.link(0, B).state is LinkState.DOWN
        world.wait(1)
        assert world.link(0, B).state is LinkState.UNUSED

    def test_a_full_page_may_leave_links_out(self) -> None:
        world = one_peer()
        world.report("path_down", remote=B, reason="silent")
        world.now += 5
        rows = tuple(world.page(1).rows[0] for _ in range(MAX_ROWS))
        world.judge.paths.looked(NetPage(pid=1, rank=1, updated_us=round(world.wall * 1e6), rows=rows), world.now)
        assert world.link(0, B).state is LinkState.DOWN

    def test_an_ended_process_says_nothing_any_more(self) -> None:
        world = one_peer()
        world.lose()
        world.judge.paths.ended(1, world.now)
        assert world.link().state is LinkState.UNUSED
        assert world.judge.paths.all_users() == set()
        world.judge.paths.ended(77, world.now)

    def test_a_stopped_process_says_nothing_until_it_goes_on(self) -> None:
        world = one_peer()
        world.lose()
        world.stopped.add(1)
        world.wait(STALE_S)
        assert world.link().state is LinkState.UNUSED
        world.stopped.clear()
        world.wait(1)
        assert world.link().state is LinkState.DOWN

    def test_one_without_a_page_is_believed_until_it_ends(self) -> None:
        world = World(paged=False)
        world.report("path_down", reason="silent")
        world.wait(100)
        assert (world.link().state, flaps(world)) == (LinkState.DOWN, 1)

    def test_a_process_that_was_seen_to_lose_a_link_before_we_came_has_lost_it_then(self) -> None:
        world = World().use((1, 0, A))
        world.now += 40
        other = World(now=world.now)
        world.links[1, 0, A].up, world.links[1, 0, A].lost_at = False, world.now - 25
        other.links = world.links
        other.wait(0.5)
        assert (other.link().since, flaps(other)) == (world.now - 25, 0), "lost for long, but when seen first no flap"


class TestPeers:
    def test_a_peer_that_ends_is_no_fault_of_its_paths(self) -> None:
        world = one_peer()
        world.wait(5)
        for path in (0, 1):
            world.lose(path=path, remote=A, reason="closed")
        assert flaps(world) == 1
        world.report("peer_unreachable", remotes=(A,))
        assert [world.link(path).state for path in (0, 1)] == [LinkState.UNREACHABLE] * 2
        assert [flaps(world, path) for path in (0, 1)] == [0, 0]
        world.wait(500)
        assert world.judge.findings == {}

    def test_what_was_lost_long_before_its_peer_was_a_flap(self) -> None:
        world = one_peer()
        world.lose()
        world.wait(1)
        world.heal()
        world.wait(10)
        for path in (0, 1):
            world.lose(path=path, reason="reset")
        world.report("peer_unreachable", remotes=(A,))
        assert [flaps(world, path) for path in (0, 1)] == [1, 0]

    def test_what_is_lost_after_its_peer_was_called_unreachable_is_no_flap_either(self) -> None:
        world = one_peer()
        world.report("peer_unreachable", remotes=(A,))
        world.lose(reason="reset")
        assert (world.link().state, flaps(world)) == (LinkState.UNREACHABLE, 0)
        world.wait(3)
        world.heal()
        assert (world.link().state, flaps(world)) == (LinkState.UP, 0)

    def test_when_the_peer_is_back_on_one_path_the_other_is_lost_from_then_on(self) -> None:
        world = one_peer()
        for path in (0, 1):
            world.lose(path=path, reason="silent")
        world.report("peer_unreachable", remotes=(A,))
        world.wait(20)
        world.heal(path=1)
        world.report("peer_back", remotes=(A,), outage_ms=20_000)
        assert (world.link().state, world.link().since) == (LinkState.DOWN, world.now)
        assert world.link(1).state is LinkState.UP

    def test_a_peer_is_heard_again_when_bytes_come_from_it(self) -> None:
        world = one_peer()
        world.report("peer_unreachable", remotes=(A,))
        world.wait(0.5)
        assert world.link().state is LinkState.UNREACHABLE, "its connections are kept, and nothing comes"
        world.links[1, 0, A].rate, world.links[1, 0, A].receives = 1e6, 0
        world.wait(0.5)
        assert world.link().state is LinkState.UNREACHABLE, "what we send nobody may hear"
        world.links[1, 0, A].receives = 1e6
        world.wait(0.5)
        assert world.link().state is LinkState.UP

    def test_what_the_kernel_says_of_our_own_interface_is_no_fault_of_a_peer(self) -> None:
        world = one_peer()
        for path in (0, 1):
            world.lose(path=path, reason="carrier")
        world.report("peer_unreachable", remotes=(A,))
        assert [world.link(path).state for path in (0, 1)] == [LinkState.DOWN] * 2
        assert flaps(world) == 1

    def test_what_does_not_change_a_path_changes_nothing(self) -> None:
        world = one_peer()
        world.report("corrupt")
        world.report("gave_up", remotes=(A,))
        assert (world.link().state, flaps(world)) == (LinkState.UP, 0)


class TestFlaps:
    def test_each_loss_is_one_flap(self) -> None:
        world = one_peer()
        for _ in range(3):
            world.lose()
            world.wait(1)
            world.heal()
            world.wait(1)
        assert (flaps(world), flaps(world, 1)) == (3, 0)

    def test_several_processes_lose_a_link_once(self) -> None:
        world = World().use((1, 0, A), (2, 0, A), (3, 0, A))
        for pid in (1, 2, 3):
            world.lose(pid)
            world.now += SAME_FLAP_S / 4
        assert flaps(world) == 1
        assert world.link().flaps[0].pids == {1, 2, 3}

    def test_what_one_process_loses_much_later_is_another_flap(self) -> None:
        world = World().use((1, 0, A), (2, 0, A))
        world.lose(1)
        world.now += SAME_FLAP_S * 1.5
        world.lose(2)
        assert flaps(world) == 2

    def test_a_process_that_loses_a_link_twice_within_that_time_has_two(self) -> None:
        world = World().use((1, 0, A), (2, 0, A))
        for _ in range(2):
            for pid in (1, 2):
                world.lose(pid)
                world.heal(pid)
            world.now += SAME_FLAP_S / 4
        assert flaps(world) == 2

    def test_a_loss_that_only_the_page_told_of_counts_and_gets_its_reason_from_a_late_report(self) -> None:
        world = one_peer()
        world.lose(told=False)
        world.wait(0.5)
        assert [flap.reason for flap in world.link().flaps] == [""]
        world.report("path_down", reason="carrier")
        assert [flap.reason for flap in world.link().flaps] == ["carrier"]
        assert world.link().reason == "carrier"

    def test_a_loss_of_which_only_the_end_is_told_counts_once(self) -> None:
        world = one_peer()
        world.wait(1)
        world.report("path_up", outage_ms=200)
        assert flaps(world) == 1
        world.wait(1)
        world.lose()
        world.wait(0.5)
        world.heal()
        assert flaps(world) == 2
        world.report("path_up", outage_ms=0)
        assert flaps(world) == 2

    def test_the_page_may_tell_of_the_end_before_the_report(self) -> None:
        world = one_peer()
        world.lose()
        world.now += 0.2
        world.links[1, 0, A].up, world.links[1, 0, A].live = True, 1
        world.show()
        world.heal()
        assert flaps(world) == 1

    @pytest.mark.parametrize(("minutes", "left"), [(59, 1), (61, 0)])
    def test_they_are_forgotten_after_an_hour(self, minutes: int, left: int) -> None:
        world = one_peer()
        world.lose()
        world.heal()
        world.now += minutes * 60
        world.wait(0.5)
        assert flaps(world) == left


class TestFigures:
    def test_counters_go_on_across_processes_and_begin_with_what_is_seen(self) -> None:
        world = World().use((1, 0, A))
        world.links[1, 0, A].rate = 1000.0
        world.wait(4)
        assert world.link().totals.sent_bytes == 4000
        world.judge.paths.ended(1, world.now)
        world.leave()
        world.use((2, 0, A))
        world.links[2, 0, A].rate = 500.0
        world.wait(2)
        assert world.link().totals.received_bytes == 4000 + 1000

    def test_figures_that_were_set_back_count_as_none(self) -> None:
        world = World().use((1, 0, A))
        world.links[1, 0, A].sent = 5000
        world.wait(0.5)
        world.links[1, 0, A].sent = 10
        world.wait(0.5)
        assert world.link().totals.sent_bytes == 5000

    def test_links_that_somebody_invents_are_counted_and_not_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "MOST_LINKS", 3)
        world = one_peer()
        for number in range(5):
            world.report("path_down", remote=f"10.9.0.{number}", reason="silent")
            world.report("path_up", remote=f"10.9.0.{number}", outage_ms=1)
        assert (len(world.judge.paths.links), world.judge.paths.left_out) == (3, 8)
        world.wait(0.5)

    def test_links_nobody_uses_are_forgotten_after_an_hour(self) -> None:
        world = two_peers()
        world.leave(1, 0, B)
        world.wait(2)
        world.now += 3600
        world.wait(0.5)
        assert (local_of(0), B) not in world.judge.paths.links
        assert (local_of(0), A) in world.judge.paths.links

    def test_links_to_our_own_addresses_tell_of_a_path_only_if_there_are_no_others(self) -> None:
        world = World().use((1, 0, local_of(0)))
        assert [link.remote for link in world.judge.paths.of_path(local_of(0))] == [local_of(0)]
        world.use((1, 0, A))
        assert [link.remote for link in world.judge.paths.of_path(local_of(0))] == [A]

    def test_a_row_says_what_the_state_is(self) -> None:
        assert [int(state) for state in (RowState.DOWN, RowState.UP, RowState.SUSPECT)] == [0, 1, 2]
