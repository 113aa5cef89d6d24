"""What a function does with its names and its loops, as its instructions tell."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from torchrelay.worker.source.names import Living, Names, collects_items


def asked(found: list[bool]) -> Iterator[int]:
    """As a tracked loop asks, when it is entered."""
    found.append(collects_items(sys._getframe(1)))
    yield from range(3)


class Wrapped:
    def __init__(self, items: Iterator[int]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        return next(self.items)


def in_a_comprehension(items: Iterator[int]) -> list[int]:
    return [one for one in items]


def in_the_second_for(items: Iterator[int]) -> dict[int, int]:
    return {one: at for at in range(1) for one in items}


def adding_up(items: Iterator[int]) -> int:
    total = 0
    for one in (each for each in items):
        total += sum([one for _ in range(2)])
    return total


def by_next(items: Iterator[int]) -> int:
    total = 0
    while (one := next(items, None)) is not None:
        total += one
    return total


def by_its_method(items: Iterator[int]) -> list[int]:
    found = list[int]()
    found.append(items.__next__())
    return found


COLLECTING: list[Callable[[Iterator[int]], Any]] = [
    in_a_comprehension, in_the_second_for, lambda items: {one for one in Wrapped(items)},
    lambda items: sum(one for one in items),
    lambda items: sum(map(abs, items)), lambda items: functools.reduce(max, items), lambda items: [*map(abs, items)],
    lambda items: max(next(iter([1, 2])), *map(abs, items)),
]  # fmt: skip


@pytest.mark.parametrize("way", COLLECTING)
def test_what_collects_out_of_sight_is_seen(way: Callable[[Iterator[int]], Any]) -> None:
    found: list[bool] = []
    way(asked(found))
    assert found == [True]


@pytest.mark.parametrize("way", [adding_up, by_next, by_its_method, lambda items: adding_up(Wrapped(items))])
def test_loops_and_next_collect_nothing_out_of_sight(way: Callable[[Iterator[int]], Any]) -> None:
    found: list[bool] = []
    way(asked(found))
    assert found == [False]


def test_what_inner_functions_assign_is_assigned_and_what_an_if_sets_up_is_a_flag() -> None:
    def outer(items: list[int]) -> int:
        count, ready = 0, False

        def add() -> None:
            nonlocal count
            count += 1

        for _ in items:
            add()
            if not ready:
                ready = True
        return count

    names = Names(outer.__code__)
    assert names.assigned - {"_"} == {"count", "ready"}
    assert names.flags == {"ready"}


def test_a_method_of_the_name_of_eval_reads_no_variables() -> None:
    def evaluates(batches: Any, model: Any) -> None:
        for batch in batches:
            model.step(batch)
            for parameter in model:
                parameter.clamp_()
            model.eval()

    def reads_all(batches: Any, model: Any) -> None:
        for batch in batches:
            model.step(batch)
            for parameter in model:
                parameter.clamp_()
            eval("parameter")

    def living(function: Any) -> frozenset[str]:
        step = next(one for one in dis.get_instructions(function) if one.argval == "step")
        return Living(function.__code__).at(step.offset)

    assert "parameter" not in living(evaluates)
    assert "parameter" in living(reads_all)
