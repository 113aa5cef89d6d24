"""What samplers, datasets and collate functions keep in attributes goes with the place of a loop."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from tests.support.hidden_loaders import SIZE, Drawing, Own, Plain, sampled
from tests.support.loaders import EPOCHS, PLACES, Places, check
from torchrelay.errors import RefusedError, StateMismatchError, UndeclaredError
from torchrelay.worker.data import beside
from torchrelay.worker.data.cursor import Cursor
from torchrelay.worker.data.loaders import source_of
from torchrelay.worker.data.loops import Loop
from torchrelay.worker.hidden_state.hidden import Hidden
from torchrelay.worker.state import random_state

pytestmark = pytest.mark.slow  # many walks


class Slotted(Sampler[int]):
    __slots__ = ("times",)

    def __init__(self) -> None:
        self.times = 0

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        self.times += 1
        return iter(np.random.default_rng(self.times).permutation(SIZE).tolist())


class Batches(Sampler[list[int]]):
    def __init__(self) -> None:
        self.state: dict[str, Any] = {"rng": random.Random(1), "epoch": 0}

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(5):
            self.state["epoch"] += 1
            yield [self.state["rng"].randrange(SIZE), self.state["epoch"]]


class Augmented(Plain):
    """A dataset with transforms that draw, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.transforms: list[Callable[[torch.Tensor], torch.Tensor]] = [
            Jitter(),
            functools.partial(shifted, rng=np.random.default_rng(3)),
        ]
        self.made = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.made += 1
        value = super().__getitem__(index) * self.made
        for transform in self.transforms:
            value = transform(value)
        return value


class Jitter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source = torch.Generator().manual_seed(2)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + torch.rand(1, generator=self.source).double()[0]


def shifted(value: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    return value + rng.normal()


everywhere = random.Random(9)


class FromOutside(Plain):
    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + everywhere.random()


def from_outside() -> Any:
    everywhere.seed(9)
    return DataLoader(FromOutside(), batch_size=4)


def collating() -> Any:
    source = np.random.default_rng(4)

    def mixed(items: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(items) * source.random()

    return DataLoader(Plain(), batch_size=4, collate_fn=mixed)


class Walking:
    """A loader of one's own that keeps its generator and its epoch, and draws its order when it begins."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)
        self.epoch = 0

    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.epoch += 1
        for at in self.rng.permutation(len(self)).tolist():
            yield torch.tensor([at + self.epoch + self.rng.random()])


class WalkingLoader(DataLoader[torch.Tensor]):
    """A DataLoader whose items are made by its own `__iter__`."""

    def __init__(self) -> None:
        super().__init__(Plain(), batch_size=4)
        self.scale = 1.0

    def __iter__(self) -> Any:
        for item in super().__iter__():
            self.scale *= 1.5
            yield item * self.scale


class Packing:
    """Of each batch something is left over for the next one, and it is more and more."""

    def __init__(self) -> None:
        self.rest: list[float] = []

    def __call__(self, items: list[torch.Tensor]) -> torch.Tensor:
        held = [*self.rest, *(float(each.sum()) for each in items)]
        self.rest = [*held[2:], *held[2:]][:90]
        return torch.tensor(held[:2])


KINDS = ("numpy", "mt19937", "legacy", "python", "torch", "one by one", "in place", "epochs")
LOADERS: dict[str, Callable[[], Any]] = {
    **{f"sampler, {kind}": sampled(kind) for kind in KINDS},
    "slots": lambda: DataLoader(Plain(), batch_size=4, sampler=Slotted()),
    "batches": lambda: DataLoader(Plain(), batch_sampler=Batches()),
    "transforms": lambda: DataLoader(Augmented(), batch_size=4),
    "a dataset by itself": Augmented,
    "a global": from_outside,
    "collate": collating,
    "what is left over": lambda: DataLoader(Plain(), batch_size=4, collate_fn=Packing()),
    "an iterable of one's own": Walking,
    "a loader that iterates by itself": WalkingLoader,
}


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("name", LOADERS)
def test_a_replacement_gets_the_same_items(name: str, places: Places) -> None:
    check(LOADERS[name], 1, places)


# ---------------------------------------------------------------- between the loops


def epoch_of(hidden: Hidden, loader: Any) -> list[Any]:
    loop: Loop[Any] = Loop(
        Cursor(),
        "batches",
        source_of(loader, hidden),
        group=None,
        length=lambda: 0,
        inside_call=lambda: False,
        arrive=lambda: None,
    )
    return [item.tolist() for item in loop]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("known", [True, False])
def test_a_loader_between_its_loops_goes_on_where_it_was(kind: str, known: bool) -> None:
    before, loader = Hidden(), sampled(kind)()
    for _ in range(2):
        epoch_of(before, loader)
    left = before.record()
    after, mine = Hidden(), sampled(kind)()
    if known:
        epoch_of(after, mine)
    after.load(left)
    assert epoch_of(after, mine) == epoch_of(before, loader)
    assert after.record() == before.record()


def test_what_its_script_has_not_come_to_yet_is_told_on() -> None:
    before, loader = Hidden(), sampled("python")()
    epoch_of(before, loader)
    after = Hidden()
    after.load(before.record())
    assert after.record() == before.record()


def test_two_objects_that_cannot_be_told_apart_are_not_mistaken_for_one_another() -> None:
    before, loaders = Hidden(), [sampled("python")(), sampled("python")()]
    epoch_of(before, loaders[0])
    epoch_of(before, loaders[1])
    epoch_of(before, loaders[1])
    after = Hidden()
    after.load(before.record())
    with pytest.raises(UndeclaredError, match="which is which"):
        epoch_of(after, sampled("python")())


def test_an_epoch_inside_a_call_is_undone_with_it() -> None:
    hidden, loader = Hidden(), sampled("numpy")()
    source = source_of(loader, hidden)

    def evaluate() -> list[Any]:
        assert source.hidden is not None
        source.hidden.within_call()
        return [item.tolist() for item in source.begin(source.mark())]

    hidden.mark()
    first = evaluate()
    hidden.rewind()
    assert evaluate() == first
    hidden.mark()
    assert evaluate() != first


# ---------------------------------------------------------------- what is refused, and what is not


class Large(Sampler[int]):
    def __init__(self) -> None:
        self.order = list(range(20_000))

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        random.Random(3).shuffle(self.order)
        return iter(at % SIZE for at in self.order[:8])


def test_an_order_that_is_too_large_to_be_carried_is_refused_in_the_first_epoch() -> None:
    with pytest.raises(RefusedError, match=r"sampler\.order changes"):
        epoch_of(Hidden(), DataLoader(Plain(), batch_size=1, sampler=Large()))


class Endless(Sampler[int]):
    """Goes on where it stopped; `anew`: begins anew, and keeps its iterator all the same."""

    def __init__(self, anew: bool = False) -> None:
        self.anew = anew
        self.stream = self.all()

    def all(self) -> Iterator[int]:
        at = 0
        while True:
            yield at % SIZE
            at += 1

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        if self.anew:
            self.stream = self.all()
        return iter([next(self.stream) for _ in range(8)])


def test_an_iterator_that_is_gone_on_with_in_the_next_epoch_is_refused_in_the_first() -> None:
    with pytest.raises(RefusedError, match=r"sampler\.stream is an iterator"):
        epoch_of(Hidden(), DataLoader(Plain(), batch_size=1, sampler=Endless()))


def test_an_iterator_that_is_made_anew_is_let_be() -> None:
    hidden, loader = Hidden(), DataLoader(Plain(), batch_size=1, sampler=Endless(anew=True))
    assert epoch_of(hidden, loader) == epoch_of(hidden, loader)


def test_a_replacement_that_has_not_built_the_same_is_told_so() -> None:
    before, loader = Hidden(), sampled("python")()
    epoch_of(before, loader)
    other = sampled("python")()
    other.sampler.rng = None
    after = Hidden()
    after.load(before.record())
    with pytest.raises(StateMismatchError, match=r"sampler\.rng"):
        epoch_of(after, other)


class Cached(Plain):
    """As many datasets are: a memo, a file that is opened when it is first needed, a history."""

    def __init__(self) -> None:
        super().__init__()
        self.memo: dict[int, torch.Tensor] = {}
        self.lengths: dict[int, int] = {}
        self.opened: int = False
        self.file: Any = None
        self.parent = self
        self.seen: list[int] = []

    def __getitem__(self, index: int) -> torch.Tensor:
        if not self.opened:
            self.file, self.opened = object(), True
        self.seen.append(index)
        self.lengths[index] = index
        return self.memo.setdefault(index, super().__getitem__(index).clone())

    @property
    def costly(self) -> int:
        raise AssertionError("properties are not asked")


def test_caches_and_files_are_left_alone() -> None:
    hidden = Hidden()
    loader = DataLoader(Cached(), batch_size=4)
    for _ in range(EPOCHS):
        epoch_of(hidden, loader)
    assert hidden.record() == b""


def test_a_look_draws_nothing_and_changes_nothing() -> None:
    loader = DataLoader(Augmented(), batch_size=4, sampler=Own("numpy"))
    before = random_state.capture(), loader.sampler.rng.bit_generator.state  # type: ignore[attr-defined]
    source = source_of(loader, Hidden())
    source.mark()
    assert (random_state.capture(), loader.sampler.rng.bit_generator.state) == before  # type: ignore[attr-defined]


# ---------------------------------------------------------------- a second loader


@pytest.fixture
def cursor(monkeypatch: pytest.MonkeyPatch) -> Cursor:
    """A script's place, and DataLoaders that are watched."""
    for thing, name in ((DataLoader, "__iter__"), (_BaseDataLoaderIter, "__next__")):
        monkeypatch.setattr(thing, name, getattr(thing, name))  # put back afterwards
    monkeypatch.setattr(beside, "_watch", None)
    found = Cursor()
    beside.watch(found, lambda: False)
    return found


def batches(cursor: Cursor, loader: Any) -> Loop[Any]:
    return Loop(
        cursor,
        "batches",
        source_of(loader),
        group=None,
        length=lambda: 0,
        inside_call=lambda: False,
        arrive=lambda: None,
    )


def test_a_second_loader_that_is_gone_on_with_in_a_later_item_is_refused(cursor: Cursor) -> None:
    others = iter(DataLoader(Plain(), batch_size=2))
    loop = iter(batches(cursor, DataLoader(Plain(), batch_size=4)))

    def turns() -> None:
        for _ in range(2):
            next(loop), next(others)

    with pytest.raises(RefusedError, match=r"test_hidden_loaders\.py:\d+.*StackDataset"):
        turns()


def test_one_that_begins_within_a_loop_is_refused_too(cursor: Cursor) -> None:
    loop = iter(batches(cursor, DataLoader(Plain(), batch_size=4)))

    def turns() -> None:
        others: Any = None
        for _ in range(2):
            next(loop)
            others = others or iter(DataLoader(Plain(), batch_size=2))
            next(others), next(others)

    with pytest.raises(RefusedError, match="a loop of batches"):
        turns()


class Calls:
    """Whether a call is under way."""

    inside = False


def test_one_that_is_gone_on_with_in_the_next_call_is_refused(cursor: Cursor) -> None:
    calls = Calls()
    beside.watch(cursor, lambda: calls.inside)
    before = iter(DataLoader(Plain(), batch_size=2))
    calls.inside = True
    with pytest.raises(RefusedError, match="inside a step or section that did not begin it"):
        next(before)
    within = iter(DataLoader(Plain(), batch_size=2))
    assert len([next(within), *within]) == SIZE // 2
    within = iter(DataLoader(Plain(), batch_size=2))
    cursor.point = cursor.point.after_step()
    with pytest.raises(RefusedError, match="did not begin it"):
        next(within)
    calls.inside = False
    with pytest.raises(RefusedError, match="after the step or section that began it"):
        next(within)


def test_a_loader_that_is_gone_through_within_an_item_is_let_be(cursor: Cursor) -> None:
    counted = 0
    for _ in batches(cursor, range(2)):
        for _ in batches(cursor, DataLoader(Plain(), batch_size=11)):
            counted += sum(1 for _ in DataLoader(Plain(), batch_size=11))
    assert counted == 2 * 2 * 2


def test_without_tracked_loops_any_loader_is_let_be(cursor: Cursor) -> None:
    del cursor
    first, second = iter(DataLoader(Plain())), iter(DataLoader(Plain()))
    assert len(list(zip(first, second, strict=True))) == SIZE


def test_an_evaluation_within_an_item_of_the_same_dataset_is_told_of(cursor: Cursor) -> None:
    hidden, data = Hidden(), Drawing()
    loader, others = DataLoader(data, batch_size=4), DataLoader(data, batch_size=2)
    loop: Loop[Any] = Loop(
        cursor,
        "batches",
        source_of(loader, hidden),
        group=None,
        length=lambda: 0,
        inside_call=lambda: False,
        arrive=lambda: None,
    )
    for number, _ in enumerate(loop):
        assert Drawing.__name__ not in str(hidden.record()), "the loop's own record tells of it"
        if number != 1:
            continue
        inside: Loop[Any] = Loop(
            cursor,
            "batches",
            source_of(others, hidden),
            group=None,
            length=lambda: 0,
            inside_call=lambda: True,
            arrive=lambda: None,
        )
        list(inside)
        assert Drawing.__name__ in str(hidden.record())
