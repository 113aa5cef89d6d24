"""What goes along with a tracked loop is in a replacement where it was, from every place; or the script is refused."""
# ruff: noqa: B905  as scripts write it

from __future__ import annotations

import builtins
import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from torchrelay.errors import RefusedError, UnprovedError
from torchrelay.worker.data import alongside
from torchrelay.worker.data.cursor import Cursor, Diverged, decode_record
from torchrelay.worker.data.loaders import source_of
from torchrelay.worker.data.loops import Loop

pytestmark = pytest.mark.slow  # many walks

PLAIN_ENUMERATE, PLAIN_ZIP, PLAIN_ISLICE = enumerate, zip, itertools.islice
alongside.prepare()
ISLICE = itertools.islice  # as a script binds it by name
itertools.islice = PLAIN_ISLICE  # type: ignore[misc]
BATCHES = [torch.arange(100) + number for number in range(9)]
WEIGHTS = [number * number for number in range(9)]


class Safepoint(Exception):
    """A script came to the end of its recording."""


class Life:
    """A process that runs a script: the first one, or its replacement after a step."""

    def __init__(self, left: bytes | None = None) -> None:
        self.cursor = Cursor(decode_record(left) if left is not None else None)
        self.told: list[Any] = []  # what each step was made with
        self.lives: list[bytes] = []

    def loop(self, kind: str, items: Any) -> Loop[Any]:
        return Loop(
            self.cursor,
            kind,
            source_of(items),
            length=lambda: len(items),
            inside_call=lambda: False,
            arrive=lambda: None,
        )

    def batches(self) -> Loop[Any]:
        return self.loop("batches", BATCHES)

    def epochs(self, count: int = 2) -> Loop[Any]:
        return self.loop("epochs", range(count))

    def step(self, *given: Any) -> None:
        told = [each[0].item() if isinstance(each, torch.Tensor) else each for each in given]
        if self.cursor.replaying:
            self.cursor.replay_call("step")
            if not self.cursor.replaying:
                self.told.append(told)
                alongside.remove()
            return
        self.told.append(told)
        point = self.cursor.point.after_step()
        self.cursor.begin_call("step", point).result = b""
        self.cursor.point = point
        self.lives.append(self.cursor.record())


@pytest.fixture(autouse=True)
def _plain() -> Iterator[None]:
    itertools.islice = ISLICE  # type: ignore[misc]
    yield
    alongside.remove()
    itertools.islice = PLAIN_ISLICE  # type: ignore[misc]


def to_device(batches: Any) -> Iterator[Any]:
    for batch in batches:
        yield batch + 0


def wrapped(rows: Any) -> Iterator[Any]:
    yield from rows


def without_odd(batches: Any) -> Iterator[Any]:
    for batch in batches:
        if batch[0] % 2 == 0:
            yield batch


def numbered(batches: Any) -> Iterator[Any]:
    for number, batch in enumerate(batches):
        if number % 2:
            yield number, batch


class Wrapper:
    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            yield batch * 1


class Items(Wrapper):
    def __iter__(self) -> Iterator[Any]:
        self.items = iter(self.batches)
        return self

    def __next__(self) -> Any:
        return next(self.items) + 0


def schedule() -> Iterator[float]:
    for number in range(3):
        yield 1.0 - number
    while True:
        yield 0.5


WAYS: dict[str, Callable[[Any], Any]] = {
    "enumerate": lambda batches: enumerate(batches),
    "from five": lambda batches: enumerate(batches, 5),
    "a generator": lambda batches: enumerate(to_device(batches)),
    "a generator expression": lambda batches: enumerate(batch * 1 for batch in batches),
    "an object": lambda batches: enumerate(Wrapper(batches)),
    "two generators": lambda batches: enumerate(to_device(Wrapper(to_device(batches)))),
    "within a generator": lambda batches: numbered(batches),
    "an islice": lambda batches: enumerate(itertools.islice(batches, 7)),
    "an islice by its name": lambda batches: ((batch, 0) for batch in ISLICE(batches, 1, 8, 3)),
    "an islice of a generator": lambda batches: zip(ISLICE(to_device(batches), 6), itertools.count()),
    "a list": lambda batches: zip(batches, WEIGHTS),
    "a list before": lambda batches: zip(WEIGHTS, batches, strict=True),
    "a count": lambda batches: zip(itertools.count(3), batches),
    "a list and a count": lambda batches: zip(itertools.count(3), to_device(batches), WEIGHTS),
    "a generator beside": lambda batches: zip(batches, schedule()),
    "in one another": lambda batches: enumerate(zip(WEIGHTS, wrapped(enumerate(to_device(batches))))),
    "map": lambda batches: map(lambda batch, weight: (batch, weight), batches, WEIGHTS),
    "a map": lambda batches: enumerate(map(lambda batch: batch + 0, batches)),
    "a filter": lambda batches: ((batch, 0) for batch in filter(lambda batch: batch[0] % 2, batches)),
    "a generator that leaves out": lambda batches: ((batch, 0) for batch in without_odd(batches)),
    "a chain": lambda batches: ((batch, 0) for batch in itertools.chain([BATCHES[3]], batches)),
}


def flat(row: Any) -> list[Any]:
    return [each for part in row for each in flat(part)] if isinstance(row, tuple) else [row]


def train(life: Life, way: Callable[[Any], Any]) -> None:
    for epoch in life.epochs():
        for row in way(life.batches()):
            life.step(epoch, *flat(row))
    life.step("end")


def check(script: Callable[[Life], None]) -> None:
    before = Life()
    script(before)
    assert len(before.lives) > 2
    last = len(before.lives) - 1
    for number in sorted({0, 1, last // 2, last // 2 + 1, last - 1, last}):
        after = Life(before.lives[number])
        alongside.install()
        try:
            script(after)
        finally:
            alongside.remove()
        assert after.told == before.told[number:], f"entered after step {number + 1}"
        assert after.lives == before.lives[number + 1 :], f"entered after step {number + 1}"


@pytest.mark.parametrize("name", WAYS)
def test_it_goes_on_from_every_place(name: str) -> None:
    check(lambda life: train(life, WAYS[name]))


@pytest.mark.parametrize("way", [list, lambda rows: sum(1 for _ in rows)])
def test_what_collects_steps_out_of_sight_is_not_entered_in_the_middle(way: Callable[[Any], Any]) -> None:
    def script(life: Life) -> None:
        for _ in life.epochs():
            way(map(life.step, life.batches()))

    before = Life()
    script(before)
    script(Life(before.lives[0]))
    with pytest.raises(UnprovedError, match=r"goes through a loop of batches: what it had collected"):
        script(Life(before.lives[2]))


def test_around_epochs_too() -> None:
    def script(life: Life) -> None:
        for number, (epoch, rate) in enumerate(zip(life.epochs(3), [0.1, 0.2, 0.3]), 1):
            for at, _ in enumerate(to_device(life.batches())):
                life.step(number, epoch, rate, at)
                if at > 3:
                    break

    check(script)


def test_a_loop_that_is_left_is_left_at_once() -> None:
    """What was found around it is not held: garbage is collected whenever it happens to be."""
    life = Life()
    for number, _ in enumerate(to_device(life.batches())):
        life.step(number)
        if number == 2:
            break
    assert len(life.cursor.frames) == 1


def pairs(batches: Any) -> Iterator[Any]:
    ahead = None
    for batch in batches:
        if ahead is not None:
            yield ahead
        ahead = batch + 0
    yield ahead


def windows(batches: Any) -> Iterator[Any]:
    before = BATCHES[0]
    for batch in batches:
        yield before, batch
        before = batch


def in_fours(batches: Any) -> Iterator[Any]:
    group = []
    for batch in batches:
        group.append(batch + 0)
        if len(group) == 4:
            yield tuple(group)
            group = []


class Ahead(Items):
    def __iter__(self) -> Iterator[Any]:
        self.items = iter(self.batches)
        self.ahead = next(self.items)
        return self

    def __next__(self) -> Any:
        found, self.ahead = self.ahead, next(self.items)
        return found


class Counted(Items):
    seen: Any = ()

    def __next__(self) -> Any:
        item = next(self.items)
        before, self.seen = self.seen, item + 0
        return before, item


def in_portions(batches: Any) -> Iterator[Any]:
    items = iter(batches)
    while portion := tuple(ISLICE(items, 3)):
        yield portion


def after_the_first(batches: Any) -> Iterator[Any]:
    items = iter(batches)
    yield next(items)
    yield from ((number, batch) for number, batch in enumerate(items))


KEPT = iter(WEIGHTS * 9)
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "tee": (lambda batches: ((batch, 0) for batch in itertools.tee(batches)[0]), r"tee\(\).*test_alongside\.py:"),
    "zip_longest": (lambda batches: itertools.zip_longest(batches, WEIGHTS), r"zip_longest\(\).*Write zip\(\)"),
    "accumulate": (lambda batches: ((b, 0) for b in itertools.accumulate(batches)), r"accumulate\(\)"),
    "pairwise": (lambda batches: itertools.pairwise(batches), r"pairwise\(\)"),
    "dropwhile": (lambda batches: ((b, 0) for b in itertools.dropwhile(bool, map(len, batches))), r"dropwhile\(\)"),
    "groupby": (lambda batches: itertools.groupby(batches, len), r"groupby\(\)"),
    "a kept iterator": (lambda batches: zip(batches, KEPT), r"kept elsewhere, too \(list_iterator\).*zip\(\)"),
    "counted beyond": (lambda batches: enumerate(without_odd(batches)), r"enumerate\(\) counts what without_odd\(\)"),
    "counted beyond a filter": (lambda batches: enumerate(filter(len, batches)), r"enumerate\(\) counts what filter"),
    "itself twice": (lambda batches: zip(*[iter(batches)] * 2), r"goes through one tracked loop twice"),
    "ahead": (pairs, r"`ahead` of pairs\(\) \(test_alongside\.py:\d+\) is kept.*DataLoader fetch ahead"),
    "windows": (windows, r"`before` of windows\(\)"),
    "in fours": (in_fours, r"`group` of in_fours\(\)"),
    "portions": (in_portions, r"in portions, by one islice\(\) after another"),
    "ahead in a class": (Ahead, r"at several places of the script"),
    "kept in a class": (Counted, r"`self\.seen` of Counted\.__next__\(\)"),
    "after the first": (after_the_first, r"at several places|in portions, by one enumerate"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_begin_anew_is_refused_at_once(name: str) -> None:
    way, words = REFUSED[name]
    life = Life()
    with pytest.raises(RefusedError, match=words):
        train(life, way)
    assert len(life.lives) < 4


def test_a_thread_that_fetches_ahead_is_refused_at_the_first_step() -> None:
    life, items = Life(), queue.Queue[Any]()

    def fetch() -> None:
        for batch in life.batches():
            items.put(batch)

    thread = threading.Thread(target=fetch)
    thread.start()
    with pytest.raises(RefusedError, match=r"a thread goes through a tracked loop.*DataLoader fetch ahead"):
        life.step(items.get())
    thread.join()


def test_a_class_with_next_that_keeps_nothing_may_be_used() -> None:
    check(lambda life: train(life, lambda batches: ((batch, 0) for batch in Items(batches))))


def test_what_comes_around_a_loop_later_is_said_and_no_replacement_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    def script(life: Life) -> None:
        for _ in life.loop("steps", range(100)):
            life.step(1)
        for batch in itertools.accumulate(life.batches()):
            life.step(batch)

    before = Life()
    script(before)
    assert capsys.readouterr().err.count("accumulate()") == 1
    with pytest.raises(Diverged, match="goes through a tracked loop by nothing that counts"):
        script(Life(before.lives[-1]))


@pytest.mark.parametrize("bounds", [(4,), (2, 7), (2, None, 2), (5, 3), (0, 7, 3), (None, None), (3, 30, 4), (0,)])
def test_the_stand_ins_do_what_plain_ones_do(bounds: tuple[int | None, ...]) -> None:
    ours, plain = iter(range(10)), iter(range(10))
    assert list(alongside.Sliced(ours, *bounds)) == list(PLAIN_ISLICE(plain, *bounds))
    assert list(ours) == list(plain), "it has taken as much"


def test_stand_ins_raise_what_plain_ones_raise() -> None:
    for lengths in ([1, 2], [2, 1], [3, 3, 2], [2, 2, 3]):
        told = []
        for kind in (zip, alongside.Zipped):
            with pytest.raises(ValueError, match=r"zip\(\) argument") as caught:
                list(kind(*map(range, lengths), strict=True))
            told.append(str(caught.value))
        assert told[0] == told[1]
    with pytest.raises(ValueError, match="islice"):
        alongside.Sliced([], -1)


def test_they_pass_for_plain_ones() -> None:
    alongside.install()
    assert isinstance(enumerate([]), enumerate)
    assert type(enumerate([1])) is PLAIN_ENUMERATE, "no loop can be behind a list"
    assert isinstance(itertools.islice([], 1), itertools.islice)
    alongside.remove()
    assert builtins.zip is PLAIN_ZIP
    assert type(itertools.islice(iter([]), 1)) is PLAIN_ISLICE
