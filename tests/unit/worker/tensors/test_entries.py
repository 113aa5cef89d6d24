"""Entries of a container are those of one moment, whatever its class does, and whatever another thread does."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from typing import Any

import pytest

from torchrelay.worker.tensors.entries import entries_of, items_of, keys_of


class Own(dict[Any, Any]):
    def items(self) -> Any:
        raise AssertionError("a method of the script was called")

    values = keys = __iter__ = items


class OwnList(list[Any]):
    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("a method of the script was called")


@pytest.mark.parametrize("make", [dict, OrderedDict, Counter, Own])
def test_all_of_a_dict_or_its_first_ones(make: Any) -> None:
    found = make()
    found.update(a=1, b=2, c=3)
    assert items_of(found) == [("a", 1), ("b", 2), ("c", 3)]
    assert (entries_of(found, 2), keys_of(found, 1)) == ([1, 2], ["a"])


def test_in_the_order_that_the_dict_has() -> None:
    found = OrderedDict(a=1, b=2)
    found.move_to_end("a")
    assert (keys_of(found), entries_of(found)) == (["b", "a"], [2, 1])


@pytest.mark.parametrize("found", [[1, 2, 3], (1, 2, 3), deque([1, 2, 3]), {1, 2, 3}, OwnList([1, 2, 3]), range(1, 4)])
def test_all_of_another_container_or_its_first_ones(found: Any) -> None:
    assert (entries_of(found), entries_of(found, 2)) == ([1, 2, 3], [1, 2])


def test_a_container_that_changes_while_it_is_read_is_read_again() -> None:
    found: OrderedDict[Any, int] = OrderedDict()

    class Key:
        """Asked for its hash by whoever reads this dict: as if another thread ran just then."""

        armed = False

        def __hash__(self) -> int:
            if self.armed:
                self.armed = False
                found["more"] = 2
            return 7

    key = Key()
    found[key] = 1
    key.armed = True
    with pytest.raises(RuntimeError):
        list(found.items())
    del found["more"]
    key.armed = True
    assert [value for _, value in items_of(found)] == [1, 2]
