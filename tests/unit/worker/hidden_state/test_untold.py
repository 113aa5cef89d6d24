"""What steps replace and is not carried: nothing stands there on a replacement, and a call made again finds it."""

from __future__ import annotations

import csv
import datetime
import decimal
import enum
import fractions
import itertools
import pathlib
import uuid
from array import array
from collections import deque, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from torchrelay.errors import RefusedError, UnprovedError
from torchrelay.worker.hidden_state import made
from torchrelay.worker.hidden_state.hidden import Hidden
from torchrelay.worker.tensors import absent

Pair = namedtuple("Pair", "h c")


@dataclass(frozen=True)
class Frozen:
    h: Any
    c: Any


class Attributes(dict[str, Any]):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class Itself(dict[str, Any]):
    def __init__(self, **entries: Any) -> None:
        super().__init__(**entries)
        self.__dict__ = self


class Row(list[Any]):
    pass


class Own(tuple[Any, ...]):
    __slots__ = ()


class Trainer:
    """Its step puts something new there each time, made of the last."""

    def __init__(self, make: Callable[[torch.Tensor], Any], size: int) -> None:
        self.kept: Any = None
        self.make, self.size, self.steps = make, size, 0

    def step(self) -> None:
        self.steps += 1
        self.kept = self.make(torch.full((self.size,), float(self.steps)))


@pytest.fixture(autouse=True)
def none_refused() -> Iterator[None]:
    absent._refused.clear()
    yield
    absent._refused.clear()


def enter(hidden: Hidden) -> None:
    hidden.mark()
    hidden.look_entry()


def leave(hidden: Hidden) -> None:
    hidden.look_gate()
    hidden.look_return()


def life(trainer: Any, calls: int) -> Hidden:
    hidden = Hidden(quiet=True)
    hidden.add(trainer.step)
    for _ in range(calls):
        enter(hidden)
        trainer.step()
        leave(hidden)
    return hidden


def taken_over(hidden: Hidden, trainer: Any) -> Hidden:
    after = Hidden(quiet=True)
    after.add(trainer.step)
    after.load(hidden.record())
    return after


MAKES: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda one: one,
    "tuple": lambda one: (one, one + 1),
    "list": lambda one: [one, one + 1],
    "dict": lambda one: {"h": one},
    "nested": lambda one: {"rnn": (one, one + 1)},
    "pair": lambda one: Pair(one, one + 1),
    "frozen": lambda one: Frozen(one, one + 1),
    "attributes": lambda one: Attributes(h=one),
    "itself": lambda one: Itself(h=one),
    "row": lambda one: Row([one]),
    "own": lambda one: Own([one]),
    "space": lambda one: SimpleNamespace(h=one),
    "array": lambda one: one.numpy(),
    "graph": lambda one: one.clone().requires_grad_() * 2,
}
SMALL = {"tensor", "tuple", "list", "dict", "pair", "frozen"}


@pytest.mark.parametrize("kind", list(MAKES))
@pytest.mark.parametrize("calls", [1, 20])
def test_nothing_stands_there_on_a_replacement(kind: str, calls: int) -> None:
    before = life(Trainer(MAKES[kind], 8192), calls)
    after = Trainer(MAKES[kind], 8192)
    taken_over(before, after)
    with pytest.raises(UnprovedError, match=r"kept from one step for the next"):
        bool(after.kept[0] if kind == "list" and type(after.kept) is list else after.kept)


@pytest.mark.parametrize("kind", sorted(SMALL))
def test_what_is_small_is_carried(kind: str) -> None:
    trainer, after = Trainer(MAKES[kind], 8), Trainer(MAKES[kind], 8)
    taken_over(life(trainer, 5), after)
    assert type(after.kept) is type(trainer.kept)
    assert made.shown(made._told(after.kept, 0)) == made.shown(made._told(trainer.kept, 0))


@pytest.mark.parametrize("kind", list(MAKES))
def test_until_a_step_has_put_another_one_there(kind: str) -> None:
    after = Trainer(MAKES[kind], 8192)
    hidden = taken_over(life(Trainer(MAKES[kind], 8192), 5), after)
    enter(hidden)
    after.step()
    leave(hidden)
    assert not absent.is_absent(after.kept)
    third = Trainer(MAKES[kind], 8192)
    taken_over(hidden, third)  # that one is lost as well
    with pytest.raises(UnprovedError):
        bool(third.kept[0] if kind == "list" and type(third.kept) is list else third.kept)


@pytest.mark.parametrize("kind", list(MAKES))
@pytest.mark.parametrize("calls", [1, 5])
def test_a_call_that_is_made_again_finds_what_it_found(kind: str, calls: int) -> None:
    trainer = Trainer(MAKES[kind], 8192)
    hidden = life(trainer, calls)
    found, steps = trainer.kept, trainer.steps
    inside = list(found) if isinstance(found, (list, tuple, dict)) else None
    enter(hidden)
    trainer.step()
    hidden.look_gate()
    hidden.rewind()
    assert trainer.kept is found or kind in SMALL
    assert trainer.steps == steps
    assert inside is None or list(found) == inside or kind in SMALL


@pytest.mark.parametrize("kind", ["pair", "frozen", "attributes", "itself"])
def test_what_is_written_to_where_it_lies_ends_a_call_that_is_cut(kind: str) -> None:
    class Writing(Trainer):
        def step(self) -> None:
            whole = self.kept
            (whole["h"] if isinstance(whole, dict) else whole.h).add_(1)

    trainer = Writing(MAKES[kind], 8192)
    trainer.kept = MAKES[kind](torch.zeros(8192))
    hidden = life(trainer, 5)
    enter(hidden)
    trainer.step()
    hidden.look_gate()
    with pytest.raises(UnprovedError, match="where it lies"):
        hidden.rewind()
    after = Writing(MAKES[kind], 8192)
    after.kept = MAKES[kind](torch.zeros(8192))
    taken_over(hidden, after)
    with pytest.raises(UnprovedError):
        after.step()


def test_of_more_than_a_record_names_a_fault_is_refused_and_the_record_stays_small() -> None:
    class Keeping(Trainer):
        def step(self) -> None:
            self.steps += 1
            for at in range(400):
                setattr(self, f"kept_{at}", torch.full((5000,), float(self.steps)))

    hidden = life(Keeping(MAKES["tensor"], 1), 3)
    assert len(hidden.record()) < 40 << 10
    with pytest.raises(UnprovedError, match="too large to be carried"):
        taken_over(hidden, Keeping(MAKES["tensor"], 1))


def test_a_cache_that_is_filled_but_once_is_left_to_the_replacement() -> None:
    class Caching(Trainer):
        def step(self) -> None:
            if self.kept is None:
                self.kept = torch.ones(8192)

    after = Caching(MAKES["tensor"], 8192)
    taken_over(life(Caching(MAKES["tensor"], 8192), 5), after)
    assert after.kept is None


def test_a_result_of_a_graph_is_carried_and_a_backward_pass_through_it_is_refused() -> None:
    class Showing(Trainer):
        def step(self) -> None:
            self.kept = torch.full((), 3.0, requires_grad=True) * 2

    trainer, after = Showing(MAKES["tensor"], 1), Showing(MAKES["tensor"], 1)
    hidden = taken_over(life(trainer, 5), after)
    assert after.kept.item() == 6.0
    with pytest.raises(UnprovedError):
        (after.kept * 2).backward()
    third = Showing(MAKES["tensor"], 1)
    taken_over(hidden, third)  # lost before it has made another one
    assert third.kept.item() == 6.0
    with pytest.raises(UnprovedError):
        third.kept.backward()


def test_containers_in_containers_of_classes_of_their_own_are_told_whole() -> None:
    class Counting(Trainer):
        def step(self) -> None:
            self.kept.inner.n += 1
            self.kept.row[0].n += 2

    def begun() -> Counting:
        found = Counting(MAKES["tensor"], 1)
        found.kept = Itself(inner=Attributes(n=1), row=Row([Attributes(n=1)]))
        return found

    trainer, after = begun(), begun()
    taken_over(life(trainer, 5), after)
    assert after.kept == trainer.kept == {"inner": {"n": 6}, "row": [{"n": 11}]}
    assert type(after.kept.inner) is Attributes
    assert after.kept.inner is after.kept["inner"]


class Metres(float):
    pass


class Label(str):
    __slots__ = ()


class Marks(enum.Flag):
    X = 1
    Y = 2


class Phase(enum.Enum):
    WARM = 1
    MAIN = 2


WORDS: dict[str, Callable[[int], Any]] = {
    "path": lambda n: pathlib.Path(f"/out/{n}"),
    "decimal": lambda n: decimal.Decimal(n) / 7,
    "fraction": lambda n: fractions.Fraction(n, 7),
    "uuid": lambda n: uuid.UUID(int=n),
    "date": lambda n: datetime.date(2020, 1, 1 + n),
    "delta": lambda n: datetime.timedelta(n, n, n),
    "moment": lambda n: datetime.datetime(2020, 1, 1 + n, 2, 3, 4, n),  # noqa: DTZ001  as scripts write it
    "range": lambda n: range(n, 3 * n, 2),
    "slice": lambda n: slice(None, n),
    "dtype": lambda n: (torch.float32, torch.bfloat16)[n % 2],
    "format": lambda n: (torch.contiguous_format, torch.channels_last)[n % 2],
    "device": lambda n: torch.device(("cpu", "meta")[n % 2]),
    "size": lambda n: torch.Size([n, 2]),
    "dtype of numpy": lambda n: np.dtype(("f4", "i8")[n % 2]),
    "own number": lambda n: Metres(n / 7),
    "own text": lambda n: Label(f"at {n}"),
    "flags": lambda n: Marks(n % 4),
    "set of members": lambda n: {list(Phase)[n % 2], n},
    "frozen set": lambda n: frozenset({list(Phase)[n % 2], (n, "x")}),
    "set in a dict": lambda n: {"seen": {list(Phase)[n % 2]}},
}


@pytest.mark.parametrize("kind", list(WORDS))
def test_values_that_are_told_by_a_word_or_a_few_numbers_are_carried(kind: str) -> None:
    class Replacing(Trainer):
        def step(self) -> None:
            self.steps += 1
            self.kept = WORDS[kind](self.steps)

    def begun() -> Replacing:
        found = Replacing(MAKES["tensor"], 1)
        found.kept = WORDS[kind](0)
        return found

    trainer, after = begun(), begun()
    hidden = life(trainer, 5)
    taken_over(hidden, after)
    assert type(after.kept) is type(trainer.kept)
    assert after.kept == trainer.kept == WORDS[kind](5)
    enter(hidden)
    trainer.step()
    hidden.look_gate()
    hidden.rewind()
    assert trainer.kept == WORDS[kind](5), "a call that is made again finds what it found"


class Indexed:
    """A sequence without a length."""

    def __getitem__(self, at: int) -> int:
        return at


@pytest.mark.parametrize(
    "make",
    [
        lambda: enumerate(range(99)), lambda: zip(range(99), [1] * 99, strict=False), lambda: map(abs, range(99)),
        lambda: itertools.chain([1], range(99)), lambda: itertools.islice(range(99), 1, None),
        lambda: iter(dict.fromkeys(range(99)).items()), lambda: iter(set(range(99))),
        lambda: enumerate(zip(range(99), range(99), strict=False)),
        lambda: itertools.product(range(9), range(9)), lambda: itertools.permutations(range(9)),
        lambda: itertools.combinations(range(9), 3), lambda: itertools.combinations_with_replacement(range(9), 3),
        lambda: itertools.tee(range(99))[1], lambda: iter(iter(range(99)).__next__, 50),
        lambda: itertools.repeat(1, 99),
        lambda: reversed(deque(range(99))), lambda: iter(array("i", range(99))), lambda: iter(b"abcdefghi"),
        lambda: iter("\u00e9\u00e8abcdefgh"), lambda: np.arange(99).flat, lambda: csv.reader(["a"] * 99),
        lambda: iter(range(1 << 70)), lambda: iter(Indexed()), lambda: zip(itertools.product(range(9), range(9))),
    ],
)  # fmt: skip
def test_iterators_that_go_through_others_are_refused(make: Callable[[], Iterator[Any]]) -> None:
    class Drawing(Trainer):
        def step(self) -> None:
            next(self.kept)

    trainer = Drawing(MAKES["tensor"], 1)
    trainer.kept = make()
    with pytest.raises(RefusedError, match="gone on with from step to step"):
        life(trainer, 3)


def test_a_set_of_a_class_of_its_own_that_steps_fill_is_not_there_and_put_back() -> None:
    class Names(set[int]):
        pass

    class Filling(Trainer):
        def step(self) -> None:
            self.steps += 1
            self.kept.add(self.steps)

    trainer, after = Filling(MAKES["tensor"], 1), Filling(MAKES["tensor"], 1)
    trainer.kept, after.kept = Names(), Names()
    hidden = life(trainer, 5)
    enter(hidden)
    trainer.step()
    hidden.look_gate()
    hidden.rewind()
    assert trainer.kept == {1, 2, 3, 4, 5}
    taken_over(hidden, after)
    with pytest.raises(UnprovedError, match="kept from one step for the next"):
        len(after.kept)
