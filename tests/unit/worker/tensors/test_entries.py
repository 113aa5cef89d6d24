"""Entries of a container are those of one moment, whatever its class does, and whatever another thread does."""

from __future__ import annotations

import queue
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from typing import Any

import pytest

from torchrelay.worker.tensors.entries import entries_of, is_drained, items_of, keys_of


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


class Writer:
    """Writes logs, slowly."""

    def __init__(self) -> None:
        self.lines: queue.Queue[int] = queue.Queue()
        self.busy, self.go_on = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        self.lines.get()
        self.busy.set()
        self.go_on.wait()
        self.lines.get()


def test_a_queue_from_which_a_thread_takes_though_it_is_busy_now_is_drained() -> None:
    writer = Writer()
    writer.lines.put(1)
    assert writer.busy.wait(10)
    writer.lines.put(2)
    assert is_drained(writer.lines)
    writer.go_on.set()
    writer.thread.join(10)
    assert is_drained(writer.lines), "for good"


def test_a_queue_that_is_ones_own_is_not_nor_one_that_a_thread_fills() -> None:
    own: queue.Queue[int] = queue.Queue()
    filled: queue.Queue[int] = queue.Queue()
    begun, over = threading.Event(), threading.Event()

    def fill() -> None:
        filled.put(1)
        begun.set()
        over.wait()

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    assert begun.wait(10)
    assert not is_drained(own)
    assert not is_drained(filled)
    over.set()
    thread.join(10)


class Fed:
    """Logs are drained by its thread, which asks settings and fills another queue; what is made ready is one's own."""

    def __init__(self) -> None:
        self.lines: queue.Queue[int] = queue.Queue()
        self.ready: queue.Queue[int] = queue.Queue()
        self.filled: queue.Queue[int] = queue.Queue()
        self.settings = {"most": 3}
        self.busy, self.go_on = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        self.lines.get()
        self.filled.put(self.settings.get("most") or 0)
        self.busy.set()
        self.go_on.wait()


def test_other_queues_of_an_object_whose_thread_drains_one_are_not() -> None:
    fed = Fed()
    fed.lines.put(1)
    assert fed.busy.wait(10)
    assert is_drained(fed.lines)
    assert not is_drained(fed.ready)
    assert not is_drained(fed.filled)
    fed.go_on.set()
    fed.thread.join(10)
