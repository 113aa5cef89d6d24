"""Process groups are wired anew under their handles, and whoever is blocked in them can be released."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from functools import partial

import pytest

from tests.scripts import groups_actions as acts
from tests.scripts.groups_ranks import Failed, Puppet, Troupe, troupe, until
from tests.support.groups import (
    EMPTY_CACHE,
    extension,  # noqa: F401  a fixture
)
from torchrelay.worker.process_groups import groups

RELEASED_S = 0.05  # how long a broken waiter takes at most on an idle core: mostly 1 ms
LATE_S = 5.0  # and on one that is busy: less than the timeouts of what is broken here


@pytest.fixture(params=["extension", "fresh backend type"])
def four(request: pytest.FixtureRequest) -> Iterator[Troupe]:
    """Four connected ranks, by either method."""
    environment = request.getfixturevalue("extension") if request.param == "extension" else EMPTY_CACHE
    with troupe(4, **environment) as ranks:
        ranks.start()
        assert ranks.ranks[0].do("method") == request.param
        yield ranks


@pytest.fixture
def two(extension: dict[str, str]) -> Iterator[Troupe]:
    with troupe(2, **extension) as ranks:
        ranks.start()
        yield ranks


def wait_until_blocked(ranks: Troupe, *waiting: int, started: int) -> None:
    """Until these ranks have started their `started`-th collective of this generation, and cannot end it."""
    for rank in waiting:
        puppet = ranks.ranks[rank]
        until(partial(has_started, puppet, started))
        puppet.assert_busy()


def has_started(puppet: Puppet, collectives: int) -> bool:
    return bool(puppet.control_do("collectives") >= collectives)


# ---------------------------------------------------------------- reconfigure


def test_groups_work_after_every_reconfigure_and_keep_their_handles(four: Troupe) -> None:
    four.do("new_group", "low", [0, 1])
    four.do("new_group", "odd", [1, 3])
    for _ in range(3):
        four.reconfigure()
        assert four.do("all_reduce") == [4.0] * 4
        assert four.do("all_reduce", group="low", ranks=[0, 1]) == [2.0] * 2
        assert four.do("all_reduce", group="odd", ranks=[1, 3]) == [2.0] * 2
    four.do("new_group", "late", [0, 2, 3])
    assert four.do("all_reduce", group="late", ranks=[0, 2, 3]) == [3.0] * 3
    four.reconfigure()
    assert four.do("all_reduce", group="late", ranks=[0, 2, 3]) == [3.0] * 3
    assert four.do("backend_names")[1] == {"default": "gloo", "low": "gloo", "odd": "gloo"}


def test_a_lost_rank_is_replaced_by_a_process_that_was_alone(four: Troupe) -> None:
    four.do("new_group", "low", [0, 1])
    four.do("call", acts.make_and_destroy_a_group)  # what the replacement does not do again
    four.ranks[1].kill()
    replacement = four.replace(1)
    replacement.do("init")
    replacement.do("new_group", "low", [0, 1])  # alone, as its script does it
    assert replacement.do("backend_names") == {"default": "gloo", "low": "gloo"}
    four.reconfigure(host=2)
    assert four.do("all_reduce", group="low", ranks=[0, 1]) == [2.0] * 2
    four.do("new_group", "late", [1, 2])  # torch counts names: the replacement must be in step
    assert four.do("all_reduce", group="late", ranks=[1, 2]) == [2.0] * 2


def test_a_mesh_that_was_made_alone_works_after_every_reconfigure(extension: dict[str, str]) -> None:
    for environment in (extension, EMPTY_CACHE):
        with troupe(4, **environment) as ranks:
            ranks.do("init")
            ranks.do("call", acts.make_mesh)
            for _ in range(2):
                ranks.reconfigure()
                # rows: ranks 0 and 2, 1 and 3; columns: ranks 0 and 1, 2 and 3
                assert ranks.do("call", acts.sums_over_mesh) == [[2, 2, 1, 1], [4, 4, 1, 1], [2, 2, 5, 5], [4, 4, 5, 5]]
            ranks.do("call", acts.monitored_barrier)


def test_collectives_keep_the_timeout_of_their_group(two: Troupe) -> None:
    assert two.do("call", acts.timeouts) == [60.0, 60.0]
    two.reconfigure(timeout_s=20.0)
    assert two.do("call", acts.timeouts) == [60.0, 60.0]


def test_collectives_are_counted_from_each_reconfigure(two: Troupe) -> None:
    before = two.ranks[0].control_do("collectives")
    two.do("all_reduce")
    assert two.ranks[0].control_do("collectives") == before + 1
    two.reconfigure()
    assert two.ranks[0].control_do("collectives") == before


def test_a_reconfigure_fails_at_once_on_all_ranks_if_one_has_not_made_a_group(extension: dict[str, str]) -> None:
    with troupe(2, **extension) as ranks:
        ranks.do("init")
        ranks.ranks[0].do("new_group", "both", [0, 1])
        address = ranks.ranks[0].do("host_store")
        begin = time.monotonic()
        ranks.tell("reconfigure", address, 1, timeout_s=20.0)
        failures = ranks.results()
        assert time.monotonic() - begin < 10
        for failure in failures:
            assert re.search(r"has a group '1' of ranks \[0, 1\], rank 1 has not: make all groups", str(failure))
        ranks.ranks[1].do("new_group", "both", [0, 1])
        ranks.reconfigure()
        assert ranks.do("all_reduce", group="both") == [2.0] * 2


def test_a_reconfigure_that_nobody_joins_can_be_broken_and_tried_again(four: Troupe) -> None:
    address = four.ranks[0].do("host_store")
    four.tell("reconfigure", address, 100, timeout_s=30.0, ranks=[0, 1, 2])
    took = []
    for rank in (0, 1, 2):
        puppet = four.ranks[rank]
        until(partial(puppet.control_do, "call", acts.waits_for, "generation 100"))
        at, _ = four.ranks[rank].control_do("break_connections")
        with pytest.raises(Failed, match=r"ReconfigureError: generation 100: "):
            four.ranks[rank].result()
        took.append(four.ranks[rank].ended_at - at)
    assert min(took) < RELEASED_S  # of any rank: each has but one try, and the machine may be busy with others
    assert max(took) < LATE_S
    four.reconfigure()
    assert four.do("all_reduce") == [4.0] * 4


def test_a_reconfigure_that_nobody_joins_ends_by_its_timeout(two: Troupe) -> None:
    address = two.ranks[0].do("host_store")
    for puppet in two.ranks:
        with pytest.raises(Failed, match="ReconfigureError"):
            puppet.do("reconfigure", address, 100 + puppet.rank, timeout_s=0.5)
        puppet.do("new_group", "both", [0, 1])  # alone again: it waits for nobody
    two.reconfigure()
    assert two.do("all_reduce", group="both") == [2.0] * 2


def test_no_store_is_an_error_at_once() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    begin = time.monotonic()
    with pytest.raises(groups.ReconfigureError, match="no store at 127"):
        groups.connect_store(address, 30.0)
    assert time.monotonic() - begin < 5


def test_nothing_is_left_of_old_generations(extension: dict[str, str]) -> None:
    with troupe(2, **extension) as ranks:
        ranks.start()
        ranks.do("new_group", "both", [0, 1])
        ranks.reconfigure()
        held = ranks.ranks[1].do("held")
        for _ in range(20):
            ranks.reconfigure()
        # A thread that has connected may end a moment after it has said so.
        until(lambda: all(now <= then for now, then in zip(ranks.ranks[1].do("held"), held, strict=True)), within_s=3.0)


def test_without_the_extension_little_is_left_of_old_generations() -> None:
    with troupe(2, **EMPTY_CACHE) as ranks:
        ranks.start()
        threads, descriptors = ranks.ranks[1].do("held")
        for _ in range(10):
            ranks.reconfigure()
        most = (threads + 2 * 10, descriptors + 2 * 10)  # two threads of each old backend
        until(lambda: all(now <= then for now, then in zip(ranks.ranks[1].do("held"), most, strict=True)), within_s=3.0)


def test_a_message_that_was_half_received_does_not_keep_a_thread_busy(four: Troupe) -> None:
    four.tell("call", acts.send_much, ranks=[1])
    assert four.ranks[0].do("call", acts.let_go_of_what_is_half_there) > 0
    four.ranks[1].kill()
    # What is to be mended. The end of the other one is heard a moment later.
    until(lambda: four.ranks[0].do("call", acts.restless_loops) == 1, within_s=10.0)
    four.replace(1).do("init")
    four.reconfigure()
    assert four.do("call", acts.restless_loops) == [0] * 4
    four.reconfigure()
    assert four.do("all_reduce") == [4.0] * 4
    assert four.do("call", acts.restless_loops) == [0] * 4


def test_a_message_that_is_under_way_between_survivors_is_left_alone(two: Troupe) -> None:
    two.tell("call", acts.send_while_silenced, ranks=[1])
    assert two.ranks[0].do("call", acts.receive_while_silenced)
    two.ranks[1].result()


# ---------------------------------------------------------------- breaking


def test_a_blocked_gate_is_released_within_milliseconds(four: Troupe) -> None:
    took: dict[int, list[float]] = {1: [], 2: [], 3: []}
    for _ in range(3):
        started = four.ranks[1].control_do("collectives") + 1
        four.tell("call", acts.gate, ranks=[1, 2, 3])
        wait_until_blocked(four, 1, 2, 3, started=started)
        for rank in (1, 2, 3):
            at, broken = four.ranks[rank].control_do("break_connections")
            assert broken > 0
            with pytest.raises(Failed) as failed:
                four.ranks[rank].result()
            assert failed.value.collective
            took[rank].append(four.ranks[rank].ended_at - at)
        four.reconfigure()
    assert all(min(each) < RELEASED_S for each in took.values()), took
    assert all(max(each) < LATE_S for each in took.values()), took
    assert four.do("call", acts.gate) == [4] * 4


@pytest.mark.parametrize("name", ["gate", "large", "broadcast", "gather_objects", "barrier"])
def test_every_collective_can_be_broken_and_says_what_it_was(two: Troupe, name: str) -> None:
    started = two.ranks[1].control_do("collectives") + 1
    two.tell("call", getattr(acts, name), ranks=[1])
    wait_until_blocked(two, 1, started=started)
    two.ranks[1].control_do("break_connections")
    with pytest.raises(Failed) as failed:
        two.ranks[1].result()
    assert failed.value.collective
    with pytest.raises(Failed) as failed:  # what it enters next fails, too
        two.ranks[1].do("call", getattr(acts, name))
    assert failed.value.collective


@pytest.mark.parametrize("name", ["receive", "send", "key_of_the_store", "call_that_nobody_else_ends"])
def test_every_other_wait_can_be_broken_and_says_what_it_was(two: Troupe, name: str) -> None:
    two.tell("call", getattr(acts, name), ranks=[1])
    if name == "call_that_nobody_else_ends":  # one that begins later is not broken
        until(lambda: two.ranks[1].control_do("call", acts.waits_for, "waiting for nothing"))
    two.ranks[1].assert_busy()
    two.ranks[1].control_do("break_connections")
    with pytest.raises(Failed) as failed:
        two.ranks[1].result(within_s=5)
    assert failed.value.collective


@pytest.mark.parametrize("waiting", [0, 1])  # one end made the connection, the other accepted it
def test_a_group_that_was_made_while_connected_can_be_broken(two: Troupe, waiting: int) -> None:
    two.do("new_group", "late", [0, 1])
    two.tell("all_reduce", group="late", ranks=[waiting])
    two.ranks[waiting].assert_busy()
    two.ranks[waiting].control_do("break_connections")
    with pytest.raises(Failed) as failed:
        two.ranks[waiting].result(within_s=5)
    assert failed.value.collective


def test_a_collective_in_flight_does_not_hold_up_the_next_reconfigure(two: Troupe) -> None:
    two.do("call", acts.start_what_cannot_end)
    two.reconfigure(timeout_s=20.0)  # shorter than the collective's own timeout
    assert two.do("all_reduce") == [2.0] * 2


def test_who_waits_for_who_waits_for_the_dead_is_released_by_a_break_alone(four: Troupe) -> None:
    # A broadcast goes down a tree: below rank 2 hangs rank 3, which never talks to rank 0.
    started = four.ranks[3].control_do("collectives") + 1
    four.tell("call", acts.broadcast, ranks=[1, 2, 3])
    wait_until_blocked(four, 1, 2, 3, started=started)
    four.ranks[0].kill()
    with pytest.raises(Failed) as failed:
        four.ranks[2].result()
    assert failed.value.collective
    four.ranks[3].assert_busy()  # its own neighbour lives: no error will come
    at, _ = four.ranks[3].control_do("break_connections")
    with pytest.raises(Failed) as failed:
        four.ranks[3].result()
    assert failed.value.collective
    assert four.ranks[3].ended_at - at < LATE_S


def test_making_a_group_can_be_broken(two: Troupe) -> None:
    two.tell("new_group", "never", [0, 1], ranks=[1])
    until(lambda: two.ranks[1].control_do("call", acts.waits_for, "connecting group"))
    two.ranks[1].control_do("break_connections")
    with pytest.raises(Failed) as failed:
        two.ranks[1].result()
    assert failed.value.collective


def test_breaking_leaves_the_sockets_of_the_script_alone(two: Troupe) -> None:
    two.ranks[1].do("call", acts.open_own_sockets)
    # Until nothing is left to break: over a connection something may still flow at first.
    until(lambda: two.ranks[1].control_do("break_connections")[1] == 0)
    assert two.ranks[1].do("call", acts.own_sockets_work)
    two.reconfigure()
    assert two.ranks[1].do("call", acts.own_sockets_work)


def test_breaking_while_nobody_communicates_does_no_harm(two: Troupe) -> None:
    for _ in range(3):
        two.ranks[0].control_do("break_connections")
    two.reconfigure()
    assert two.do("all_reduce") == [2.0] * 2


def test_a_forked_child_does_not_hold_the_connections_of_a_dead_rank(two: Troupe) -> None:
    child = two.ranks[0].do("call", acts.fork_a_child)
    try:
        started = two.ranks[1].control_do("collectives") + 1
        two.tell("call", acts.gate, ranks=[1])
        wait_until_blocked(two, 1, started=started)
        two.ranks[0].kill()
        with pytest.raises(Failed) as failed:
            two.ranks[1].result(within_s=10)
        assert failed.value.collective
    finally:
        os.kill(child, 9)


def test_stores_and_devices_listen_on_loopback_only(two: Troupe) -> None:
    two.ranks[0].do("host_store")
    hosts = {host for host, _ in two.ranks[0].do("call", acts.listening)}
    assert hosts == {"127.0.0.1"}
