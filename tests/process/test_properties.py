"""Properties: any sequence of events, against an independent tally of what every worker holds and left behind.

The tally never asks the core. It knows what each worker has committed, in which gate it is, and what its page holds;
from that it judges each order: whether its receiver can obey, whether sources have what they are named for, whether
all who resume stand at the same point, and whether that point has gone back.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.properties import MOVES, check
from torchrelay.protocol.model.table import Table


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(MOVES)
def test_whatever_happens_orders_can_be_obeyed_and_every_job_trains_or_ends(moves: list[tuple[int, int]]) -> None:
    check(moves)


@settings(max_examples=600, deadline=None, database=None, derandomize=True)
@given(MOVES)
def test_whatever_else_happens(moves: list[tuple[int, int]]) -> None:
    check(moves)


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=30))
def test_a_table_is_a_dict_that_never_changes(puts: list[tuple[int, int]]) -> None:
    table: Table[int, int] = Table()
    plain: dict[int, int] = {}
    for key, value in puts:
        before = dict(table)
        after = table.drop(key) if value == 0 else table.put(key, value)
        assert dict(table) == before
        if value == 0:
            plain.pop(key, None)
        else:
            plain[key] = value
        table = after
        assert (dict(table.items()), list(table.values()), len(table)) == (plain, list(plain.values()), len(plain))
        assert table == Table(plain)
        assert hash(table) == hash(Table(reversed(list(plain.items()))))
        assert all(name in table and table[name] == plain[name] for name in plain)
