"""Tables: every version is what a dict in its place would be, whichever versions were made of it."""

from __future__ import annotations

import random

import pytest

from torchrelay.protocol.model.table import BLOCK, SMALL, Table

Versions = list[tuple[Table[int, int], dict[int, int]]]


def check(table: Table[int, int], like: dict[int, int], keys: int) -> None:
    assert list(table.items()) == list(like.items())
    assert list(table) == list(like)
    assert list(table.values()) == list(like.values())
    assert (len(table), len(table.items()), len(table.values())) == (len(like),) * 3
    for key in range(keys):
        assert (key in table) is (key in like)
        assert table.get(key) == like.get(key)
        assert table.get(key, -1) == like.get(key, -1)
        if key in like:
            assert table[key] == like[key]
        else:
            with pytest.raises(KeyError):
                table[key]
    other = Table(like)
    assert table == other
    assert other == table
    assert hash(table) == hash(other)
    assert repr(table) == repr(other) == f"Table({like!r})"


@pytest.mark.parametrize("seed", range(40))
def test_each_version_is_what_a_dict_would_be(seed: int) -> None:
    draw = random.Random(seed)
    size = draw.choice((3, SMALL - 1, SMALL, SMALL + 1, SMALL + BLOCK, 3 * SMALL))
    start = {key: key for key in range(size)}
    keys = size + BLOCK + 2
    versions: Versions = [(Table(start), start)]
    puts = draw.choice((0.2, 0.5, 0.8))
    for _ in range(4 * SMALL):
        table, like = versions[-1] if draw.random() < 0.95 else draw.choice(versions)
        key, like = draw.randrange(keys), dict(like)
        if draw.random() < puts:
            table, like[key] = table.put(key, draw.randrange(9)), 0
            like[key] = table[key]
        else:
            table = table.drop(key)
            like.pop(key, None)
        versions.append((table, like))
    for table, like in versions[::16]:
        check(table, like, keys)


def is_odd(value: int) -> bool:
    return value % 2 == 1


def is_eight(value: int) -> bool:
    return value == 8


def third(value: int) -> int:
    return value % 3


def check_what_is_counted(table: Table[int, int], like: dict[int, int]) -> None:
    for fact in (is_odd, is_eight):
        having = [(key, value) for key, value in like.items() if fact(value)]
        assert table.count(fact) == len(having)
        assert table.any(fact) is bool(having)
        assert list(table.where(fact)) == having
    for name in range(4):
        assert list(table.group(third, name)) == [(key, value) for key, value in like.items() if third(value) == name]


@pytest.mark.parametrize("seed", range(40))
def test_what_is_counted_is_what_a_walk_would_count(seed: int) -> None:
    draw = random.Random(seed)
    size = draw.choice((3, SMALL, SMALL + 1, 3 * SMALL))
    table, like = Table((key, key % 7) for key in range(size)), {key: key % 7 for key in range(size)}
    new = size
    values = draw.choice(((0, 8), (1, 8), tuple(range(9))))
    for step in range(6 * SMALL):
        key = draw.choice((*like, new))
        new += key == new
        if draw.random() < 0.7:
            like[key] = draw.choice(values)
            table = table.put(key, like[key])
        else:
            like.pop(key, None)
            table = table.drop(key)
        if step % draw.choice((1, 2, 50)) == 0:
            check_what_is_counted(table, like)
    check_what_is_counted(table, like)


def test_versions_of_one_table_count_each_for_itself() -> None:
    first = Table((key, 0) for key in range(3 * SMALL))
    check_what_is_counted(first, dict(first))
    one, two = first.put(5, 1).put(900, 8), first.drop(5)
    for version in (one, two, first, one.drop(900), two.put(7, 3)):
        check_what_is_counted(version, dict(version))


@pytest.mark.parametrize("size", [3, SMALL, 3 * SMALL])
def test_differences_are_what_was_put_and_dropped(size: int) -> None:
    class Thing:
        pass

    things = {key: Thing() for key in range(size)}
    before = Table(things)
    new, other = Thing(), Thing()
    after = before.put(1, new).drop(2).put(size, other)
    expected = {1: (things[1], new), 2: (things[2], None), size: (None, other)}
    assert {key: (was, now) for key, was, now in after.differences(before)} == expected
    back = {key: (now, was) for key, (was, now) in expected.items()}
    assert {key: (was, now) for key, was, now in before.differences(after)} == back
    assert not list(after.differences(after))
    assert not list(Table(dict(after)).differences(after)), "though it has blocks of its own"


def test_a_version_is_not_touched_by_what_is_made_of_it() -> None:
    first = Table((key, key) for key in range(2 * SMALL))
    versions = [first.put(1000, value).put(1001 + value, value).drop(7) for value in range(3)]
    check(first, {key: key for key in range(2 * SMALL)}, 2 * SMALL + 1)
    for value, version in enumerate(versions):
        expected = {key: key for key in range(2 * SMALL)} | {1000: value, 1001 + value: value}
        del expected[7]
        check(version, expected, 2 * SMALL)
        assert (1001 + value in version, 1001 + (value + 1) % 3 in version) == (True, False)


def test_tables_that_differ_are_not_equal() -> None:
    large = Table((key, key) for key in range(2 * SMALL))
    for other in (large.put(3, 9), large.put(1000, 1), large.drop(3), Table({3: 3}), Table(), large.drop(3).put(3, 9)):
        assert large != other
        assert other != large
    assert large.put(3, 9).put(3, 3) == large
    assert large.drop(3).put(3, 3) == large, "the order is no part of it"
    assert large.put(1000, 1).drop(1000) == large
    fresh = Table(dict(large))
    assert fresh.put(1000, 1).drop(1000) == fresh, "though one has a gap at its end"
    assert fresh.put(1001, 1).put(3, 9).put(3, 3).drop(1001) == fresh
    assert large != dict(large)
    assert Table({1: 2}) != {1: 2}


def test_what_changes_nothing_makes_no_new_version() -> None:
    small, large = Table({1: 1}), Table((key, key) for key in range(2 * SMALL))
    assert small.drop(2) is small
    assert large.drop(-1) is large


def changed(before: Table[int, int], after: Table[int, int]) -> int:
    """How many blocks the two do not share."""
    return sum(one is not two for one, two in zip(before._blocks, after._blocks, strict=False))


def test_a_change_copies_one_block_of_a_large_table() -> None:
    large = Table((key, key) for key in range(64 * BLOCK))
    assert changed(large, large.put(5 * BLOCK, 0)) == 1
    assert changed(large, large.drop(5 * BLOCK)) == 1
    assert {len(block) for block in large._blocks} == {BLOCK}
    longer = large.put(-1, 0)
    assert (changed(large, longer), len(longer._blocks)) == (0, len(large._blocks) + 1)
    longest = longer.put(-2, 0)
    assert (changed(longer, longest), len(longest._blocks)) == (1, len(longer._blocks))


def test_gaps_are_closed_when_they_are_half_of_it() -> None:
    table = Table((key, key) for key in range(8 * SMALL))
    for key in range(7 * SMALL + 1):
        table = table.drop(key)
        assert table._items is not None or table._used < 2 * len(table) + 2
    assert list(table) == list(range(7 * SMALL + 1, 8 * SMALL))
    assert table._items is not None, "it is small again"
