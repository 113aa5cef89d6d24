"""Who waits for whom across groups: the one that is in the way of all is told from those that wait themselves."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from torchrelay.protocol.health.wait_for_graph import DEFAULT, Position, Wait, WaitForGraph
from torchrelay.protocol.messages.ids import Rank, WorkerId

ROW, COLUMN, OTHER_ROW, OTHER_COLUMN = 11, 12, 13, 14
# A mesh of two by two: ranks 0 and 1, 2 and 3 are rows; 0 and 2, 1 and 3 columns.
MESH = {0: (ROW, COLUMN), 1: (ROW, OTHER_COLUMN), 2: (OTHER_ROW, COLUMN), 3: (OTHER_ROW, OTHER_COLUMN)}


def worker(rank: int) -> WorkerId:
    return WorkerId(f"w{rank}")


def stand(rank: int, begun: Mapping[int, int], *, since: int = 0, whole: bool = True) -> Position:
    elsewhere = sum(number for key, number in begun.items() if key != DEFAULT)
    return Position(worker(rank), Rank(rank), {DEFAULT: 5, **begun}, elsewhere, whole, since)


def in_the_way(stands: list[Position], ranks: int = 4) -> list[int]:
    picture = WaitForGraph(stands, ranks)
    return [int(one.rank) for one in stands if picture.in_the_way(one.worker) is not None]


def mesh(*begun: tuple[int, int], **given: bool) -> list[Position]:
    """For each rank, what it has begun in its row and in its column."""
    return [stand(rank, dict(zip(MESH[rank], numbers, strict=True)), **given) for rank, numbers in enumerate(begun)]


def test_who_is_behind_in_its_row_is_in_the_way_of_all() -> None:
    # Rank 3 hangs; rank 2 waits for it in their row, rank 0 for rank 2 in their column, rank 1 for rank 0 in its row.
    assert in_the_way(mesh((7, 4), (8, 3), (7, 3), (6, 3))) == [3]


def test_who_waits_in_one_group_and_is_waited_for_in_another_is_not_in_the_way() -> None:
    picture = WaitForGraph(mesh((7, 4), (8, 3), (7, 3), (6, 3)), 4)
    assert picture.wait_for(worker(2)) == Wait(0, (Rank(0),), (Rank(0), Rank(2)))
    assert picture.in_the_way(worker(2)) is None


def test_nobody_is_in_the_way_if_all_have_begun_the_same() -> None:
    assert in_the_way(mesh((7, 4), (7, 4), (7, 4), (7, 4))) == []


def test_two_that_hang_are_both_in_the_way() -> None:
    assert in_the_way(mesh((7, 4), (6, 4), (7, 4), (6, 4))) == [1, 3]


def test_a_group_that_only_some_ranks_use_sets_nobody_back() -> None:
    saves = 15  # ranks 0 and 1 save, with many collectives of their own
    stands = [stand(0, {saves: 90}), stand(1, {saves: 90}), stand(2, {}), stand(3, {})]
    assert in_the_way(stands) == []


def test_who_waits_for_one_of_whom_nothing_is_known_is_let_be() -> None:
    stands = mesh((7, 4), (8, 3), (7, 3), (6, 3))
    for silent in range(4):
        assert in_the_way(stands[:silent] + stands[silent + 1 :]) == []
        untold = [one if one.rank != silent else stand(silent, {}, whole=False) for one in stands]
        assert in_the_way(untold) == []


def test_who_has_used_the_default_group_alone_needs_no_other_to_be_known() -> None:
    stands = [stand(0, {DEFAULT: 6, ROW: 3}, whole=False), stand(1, {DEFAULT: 5})]
    assert in_the_way(stands) == [1]
    assert in_the_way([stands[0], stand(1, {DEFAULT: 5, COLUMN: 1})]) == []


def test_a_stage_that_waits_for_what_another_sends_waits_for_that_one() -> None:
    first, second = 21, 22  # from rank 0 to 1, from rank 1 to 2
    stands = [stand(0, {first: 3}), stand(1, {first: 4, second: 3}), stand(2, {second: 4})]
    assert in_the_way(stands, ranks=3) == [0]


def test_a_wait_is_as_old_as_the_last_move_of_who_waits_first_and_of_the_one_that_is_waited_for() -> None:
    ahead = [stand(0, {ROW: 2}, since=300), stand(1, {ROW: 3}, since=200)]
    for since, told in ((100, 200), (250, 250), (900, 900)):
        wait = WaitForGraph([*ahead, stand(2, {ROW: 1}, since=since)], 3).in_the_way(worker(2))
        assert wait is not None
        assert wait.since_ms == told


@pytest.mark.parametrize(
    ("wait", "told"),
    [
        (Wait(0, (Rank(1), Rank(2)), ()), "others wait for it"),
        (Wait(0, (Rank(1),), (Rank(1), Rank(3))), "rank 1 waits for it in a group of ranks 1, 3"),
        (
            Wait(0, (Rank(0), Rank(1)), (Rank(0), Rank(1), Rank(3))),
            "ranks 0, 1 wait for it in a group of ranks 0, 1, 3",
        ),
    ],
)
def test_a_wait_is_told_for_people(wait: Wait, told: str) -> None:
    assert str(wait) == told


def test_of_a_worker_that_is_not_in_the_picture_nothing_is_told() -> None:
    picture = WaitForGraph([stand(0, {})], 2)
    assert picture.wait_for(worker(1)) is None
    assert picture.in_the_way(worker(1)) is None


def test_in_a_group_nobody_waits_but_its_members_and_in_the_default_group_all_may() -> None:
    stands = [stand(0, {ROW: 1}), stand(1, {ROW: 0}), stand(2, {}), stand(3, {DEFAULT: 4})]
    picture = WaitForGraph(stands, 4)
    assert picture.in_the_way(worker(1)) is None  # it waits for rank 3
    assert picture.wait_for(worker(1)) == Wait(0, (Rank(0),), (Rank(0), Rank(1)))
    assert picture.in_the_way(worker(3)) == Wait(0, (Rank(0), Rank(1), Rank(2)), ())
