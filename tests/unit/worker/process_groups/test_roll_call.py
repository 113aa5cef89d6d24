"""The roll call: alike on all ranks, said to all of them if a group is missing, and a few bytes for each."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore

from torchrelay.worker.process_groups.roll_call import call_roll

Made = list[dict[str, list[int]]]  # by rank: the groups that it has made


class Counted:
    """A store that counts the bytes that it hands out."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.bytes = 0

    def get(self, key: str) -> bytes:
        found: bytes = self._store.get(key)
        self.bytes += len(found)
        return found

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def called(made: Made, counts: list[int] | None = None) -> tuple[list[int | str], list[int]]:
    """What each rank learns, and how many bytes were read for it; all call at once."""
    shared, together = HashStore(), threading.Barrier(len(made))
    stores = [Counted(PrefixStore("roll", shared)) for _ in made]

    def call(rank: int) -> int | str:
        together.wait()
        try:
            return call_roll(stores[rank], rank, len(made), made[rank], counts[rank] if counts else 1)  # type: ignore[arg-type]
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(len(made)) as pool:
        return list(pool.map(call, range(len(made)))), [store.bytes for store in stores]


def whole(ranks: int) -> dict[str, list[int]]:
    return {"0": list(range(ranks))}


def test_all_learn_the_greatest_count() -> None:
    assert called([whole(8)] * 8, [3, 9, 1, 4, 9, 2, 6, 5])[0] == [9] * 8


def test_ranks_may_be_in_different_groups_that_are_whole() -> None:
    made = [whole(4) | {"1": [0, 1]}, whole(4) | {"1": [0, 1]}, whole(4) | {"2": [3, 2]}, whole(4) | {"2": [3, 2]}]
    assert called(made)[0] == [1] * 4


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ([{"1": [0, 1]}, {}, {}], r"rank 0 has a group '1' of ranks \[0, 1\], rank 1 has not: make all groups"),
        ([{}, {}, {"5": [0, 1, 2]}], r"rank 2 has a group '5' of ranks \[0, 1, 2\], rank 0 has not"),
        ([{"1": [0, 1]}, {"1": [0, 1, 2]}, {}], r"rank 0 has a group '1' of ranks \[0, 1\], rank 1 has not"),
        ([{"1": [0, 1]}, {"1": [1, 0]}, {}], r"rank 0 has a group '1' of ranks \[0, 1\], rank 1 has not"),
        ([{"1": [1, 2]}, {}, {"2": [0]}], r"rank 0 has a group '1' of ranks \[1, 2\], rank 1 has not"),
    ],
)
def test_a_group_that_one_rank_has_not_made_is_said_by_all(made: Made, said: str) -> None:
    told, _ = called([whole(3) | groups for groups in made])
    assert len(set(told)) == 1, told
    assert re.match(said, str(told[0]))


def test_who_calls_twice_in_a_generation_is_refused() -> None:
    store = HashStore()
    assert call_roll(store, 0, 1, {"0": [0]}, 1) == 1
    with pytest.raises(ValueError, match="rank 0 has called before"):
        call_roll(store, 0, 1, {"0": [0]}, 1)


def test_what_is_read_does_not_grow_with_the_ranks() -> None:
    few, many = (max(called([whole(ranks)] * ranks)[1]) for ranks in (4, 48))
    assert many <= few
