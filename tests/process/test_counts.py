"""What is begun in each group is counted alike on all its members, whoever sends what to whom besides."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.scripts import groups_actions as acts
from tests.scripts.groups_ranks import Troupe, troupe
from torchrelay.protocol.health.wait_for_graph import DEFAULT
from torchrelay.worker.process_groups.counts import key_of

Begun = tuple[int, dict[int, int]]


@pytest.fixture
def four() -> Iterator[Troupe]:
    with troupe(4) as ranks:
        ranks.start()
        yield ranks


def begun(ranks: Troupe) -> list[Begun]:
    return [puppet.control_do("begun") for puppet in ranks.ranks]


def moved(before: list[Begun], after: list[Begun]) -> list[Begun]:
    """By how much each count has grown, on each rank."""
    return [
        (now - then, {key: number - known.get(key, 0) for key, number in told.items() if number != known.get(key)})
        for (then, known), (now, told) in zip(before, after, strict=True)
    ]


def test_members_of_a_group_have_the_same_key_and_the_same_count(four: Troupe) -> None:
    four.do("call", acts.make_mesh)
    before = begun(four)
    four.do("call", acts.sums_over_mesh)
    grown = moved(before, begun(four))
    assert [default for default, _ in grown] == [0] * 4
    groups = [set(others) for _, others in grown]
    assert all(others == {key: 2 for key in others} and len(others) == 2 for _, others in grown)
    # Rows are ranks 0 and 2, 1 and 3; columns ranks 0 and 1, 2 and 3.
    assert [len(groups[0] & groups[rank]) for rank in range(4)] == [2, 1, 1, 0]


def test_counts_begin_anew_with_each_reconfigure_and_keys_stay(four: Troupe) -> None:
    four.do("call", acts.make_mesh)
    four.do("call", acts.sums_over_mesh)
    keys = [set(others) for _, others in begun(four)]
    four.reconfigure()
    assert begun(four) == [(1, dict.fromkeys(known, 0)) for known in keys]


def test_what_goes_from_one_rank_to_another_is_a_count_of_these_two(four: Troupe) -> None:
    before = begun(four)
    four.do("call", acts.pass_on, 3)
    grown = moved(before, begun(four))
    first, second = key_of("0 from", (0, 1)), key_of("0 from", (1, 2))
    assert grown == [(0, {first: 3}), (0, {first: 3, second: 3}), (0, {second: 3}), (0, {})]


def test_what_gloo_makes_of_messages_does_not_set_ranks_apart(four: Troupe) -> None:
    four.do("call", acts.monitored_barrier)
    assert begun(four) == [(2, {})] * 4


def test_who_receives_from_anybody_tells_of_nothing_until_the_next_reconfigure(four: Troupe) -> None:
    four.do("call", acts.receive_from_anybody)
    assert [(default, others is None) for default, others in begun(four)] == [(1, rank == 1) for rank in range(4)]
    four.reconfigure()
    assert begun(four) == [(1, {})] * 4


def test_a_group_that_the_script_has_destroyed_is_counted_no_more(four: Troupe) -> None:
    four.do("call", acts.make_and_destroy_a_group)
    assert [others for _, others in begun(four)] == [{}] * 4


def test_keys_tell_groups_apart() -> None:
    keys = {key_of("1", (0, 1)), key_of("1", (0, 2)), key_of("2", (0, 1)), key_of("1 from", (0, 1))}
    assert len(keys) == 4
    assert DEFAULT not in keys
    assert max(keys) < 1 << 64
