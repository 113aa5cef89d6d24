"""What a loader's objects hold is compared: other rows are found before they are trained on, caches are not rows."""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from torchrelay.errors import UnprovedError
from torchrelay.worker.data import holdings

ROWS = 40


@pytest.fixture(autouse=True)
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look is made, however short a time ago the last one was."""
    monkeypatch.setattr(holdings, "REST", 0)


class Rows(Dataset[Any]):
    """A data set with this in its attributes."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> int:
        return index


class Ordered(Sampler[int]):
    def __init__(self, order: list[int]) -> None:
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)


class OwnLoader(DataLoader[Any]):
    """One that keeps rows in itself."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__(Rows())
        self.rows = rows


@dataclass(slots=True)
class Slotted:
    text: str
    label: int


@dataclass
class Plain:
    path: Path
    image: np.ndarray[Any, Any]


RECORD = np.dtype([("few", "i1"), ("many", "f8")], align=True)


class Named(NamedTuple):
    text: str
    label: int


class Sample:
    """A row of a class of the script's."""

    def __init__(self, tokens: list[int], label: int) -> None:
        self.tokens, self.label = tokens, label


def last_one(value: int) -> list[int]:
    """Many numbers, of which the last is this."""
    return [*range(ROWS - 1), value]


def tail(value: int, size: int = 100_000) -> torch.Tensor:
    found = torch.arange(size)
    found[size // 2] = value
    return found


def array(value: int) -> Any:
    return tail(value).numpy()


# Each makes a loader of which one row is this number.
OTHER_ROWS: dict[str, Callable[[int], Any]] = {
    "a list": lambda n: DataLoader(Rows(rows=last_one(n))),
    "a tuple": lambda n: DataLoader(Rows(rows=tuple(last_one(n)))),
    "a deque": lambda n: DataLoader(Rows(rows=deque(last_one(n)))),
    "a set": lambda n: DataLoader(Rows(rows=set(last_one(n)))),
    "a dict": lambda n: DataLoader(Rows(rows=dict(enumerate(last_one(n))))),
    "the order of a dict": lambda n: DataLoader(Rows(rows=dict(list(enumerate(range(ROWS)))[::n]))),
    "a tensor": lambda n: DataLoader(Rows(rows=tail(n))),
    "a part of a tensor": lambda n: DataLoader(Rows(rows=tail(n)[::2])),
    "an array": lambda n: DataLoader(Rows(rows=array(n))),
    "a view of an array": lambda n: DataLoader(Rows(rows=array(n)[5:])),
    "another length": lambda n: DataLoader(Rows(rows=list(range(1000 + n)))),
    "another type": lambda n: DataLoader(Rows(rows=array(7).astype(np.int64 if n == 1 else np.float64))),
    "bool and number": lambda n: DataLoader(Rows(rows=[*range(ROWS), True if n == 1 else 1])),
    "texts": lambda n: DataLoader(Rows(rows=[f"row {k}" for k in last_one(n)])),
    "paths": lambda n: DataLoader(Rows(rows=[f"/data/{k}.png" for k in last_one(n)])),
    "path objects": lambda n: DataLoader(Rows(rows=[Path(f"/data/{k}.png") for k in last_one(n)])),
    "one long text": lambda n: DataLoader(Rows(text="lorem ipsum " * 500 + str(n))),
    "one long run of bytes": lambda n: DataLoader(Rows(text=b"lorem ipsum " * 500 + str(n).encode())),
    "pairs": lambda n: DataLoader(Rows(rows=[(f"row {k}", k) for k in last_one(n)])),
    "named tuples": lambda n: DataLoader(Rows(rows=[Named("row", k) for k in last_one(n)])),
    "data classes": lambda n: DataLoader(Rows(rows=[Plain(Path("/x"), array(k)[:60_000]) for k in (1, 2, 3, n)])),
    "slots": lambda n: DataLoader(Rows(rows=[Slotted("row", k) for k in last_one(n)])),
    "objects": lambda n: DataLoader(Rows(rows=[Sample([1, 2, 3, k], 4) for k in last_one(n)])),
    "a number in objects": lambda n: DataLoader(Rows(rows=[Sample([1], k) for k in last_one(n)])),
    "dicts": lambda n: DataLoader(Rows(rows=[{"text": "row", "label": k} for k in last_one(n)])),
    "tensors in a list": lambda n: DataLoader(Rows(rows=[torch.tensor([k, 2, 3]) for k in last_one(n)])),
    "tensors in a short list": lambda n: DataLoader(Rows(rows=[tail(3), tail(n)])),
    "tensors in a dict": lambda n: DataLoader(Rows(rows={"x": tail(3), "y": tail(n)})),
    "objects in an array": lambda n: DataLoader(Rows(rows=np.array([str(k) for k in last_one(n)], dtype=object))),
    "texts in an array": lambda n: DataLoader(Rows(rows=np.array([str(k) for k in last_one(n)]))),
    "an object in an attribute": lambda n: DataLoader(Rows(store=Sample(last_one(n), 1))),
    "TensorDataset": lambda n: DataLoader(TensorDataset(tail(3), tail(n))),
    "Subset": lambda n: DataLoader(Subset(Rows(), last_one(n % ROWS))),
    "Subset of Subset": lambda n: DataLoader(Subset(Subset(Rows(), last_one(n % ROWS)), range(10))),
    "ConcatDataset": lambda n: DataLoader(ConcatDataset([Rows(), Rows(rows=last_one(n))])),
    "a sampler's order": lambda n: DataLoader(Rows(), sampler=Ordered(last_one(n))),
    "SubsetRandomSampler": lambda n: DataLoader(Rows(), sampler=SubsetRandomSampler(last_one(n))),
    "WeightedRandomSampler": lambda n: DataLoader(Rows(), sampler=WeightedRandomSampler([1.0, 2.0, 3.0, float(n)], 4)),
    "a list of batches": lambda n: [torch.tensor([1]), torch.tensor([n])],
    "a short list": lambda n: [1, n],
    "a tensor itself": lambda n: torch.tensor([1, 2, n]),
    "a loader's own rows": lambda n: OwnLoader(last_one(n)),
    "arguments of a collate function": lambda n: DataLoader(Rows(), collate_fn=functools.partial(collate, last_one(n))),
    "a closure of a collate function": lambda n: DataLoader(Rows(), collate_fn=closing_over(last_one(n))),
    "a method that collates": lambda n: DataLoader(Rows(), collate_fn=Collate(last_one(n)).__call__),
    "bfloat16": lambda n: DataLoader(Rows(rows=tail(n, 2_000_000).to(torch.bfloat16))),
    "a sparse tensor": lambda n: DataLoader(Rows(rows=torch.eye(4).mul(n).to_sparse())),
    "rows of a sparse tensor": lambda n: DataLoader(Rows(rows=torch.eye(4).mul(n).to_sparse_csr())),
    "pairs of paths": lambda n: DataLoader(Rows(rows=[(f"/data/{k}.png", k % 3) for k in last_one(n)])),
    "forty data sets": lambda n: DataLoader(ConcatDataset([*(Rows() for _ in range(40)), Rows(rows=last_one(n))])),
    "labels by name": lambda n: DataLoader(Rows(labels={f"class {k}": k for k in last_one(n)})),
    "records": lambda n: DataLoader(Rows(rows=np.array([(1, 2.0), (n, 3.0)], dtype=RECORD))),
    "what a collate function holds": lambda n: DataLoader(Rows(), collate_fn=Collate(last_one(n))),
}  # fmt: skip


def collate(vocabulary: list[int], items: list[Any]) -> Any:
    return vocabulary, items


def closing_over(vocabulary: list[int]) -> Callable[[list[Any]], Any]:
    return lambda items: (vocabulary, items)


class Collate:
    def __init__(self, vocabulary: list[int]) -> None:
        self.vocabulary = vocabulary

    def __call__(self, items: list[Any]) -> Any:
        return items


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("kind", OTHER_ROWS)
def test_other_rows_are_found(kind: str) -> None:
    make = OTHER_ROWS[kind]
    told = holdings.of(first := make(1)).told()
    assert told, "it is told"
    again, other = make(1), make(-1)
    holdings.of(again).check(told)
    with pytest.raises(UnprovedError, match="is not what it was in the worker that was lost"):
        holdings.of(other).check(told)
    assert holdings.of(first).told() == told


def told_by(loader: Any) -> bytes:
    return holdings.of(loader).told()


def check(loader: Any, told: bytes) -> None:
    holdings.of(loader).check(told)


def test_one_row_of_two_hundred_megabytes_is_found() -> None:
    large = np.zeros(200 << 20, dtype=np.uint8)
    told = told_by(DataLoader(Rows(rows=large)))
    check(DataLoader(Rows(rows=large.copy())), told)
    large[123_456_789] = 1
    with pytest.raises(UnprovedError, match=r"dataset\.rows of a torch\.utils\.data\.dataloader\.DataLoader"):
        check(DataLoader(Rows(rows=large)), told)


def of_pandas(n: int) -> Any:
    return pytest.importorskip("pandas").DataFrame({"text": [f"row {k}" for k in last_one(n)], "label": range(ROWS)})


def of_arrow(n: int) -> Any:
    arrow = pytest.importorskip("pyarrow")
    return arrow.table({"text": [f"row {k}" for k in last_one(n)], "label": list(range(ROWS))})


@pytest.mark.parametrize("kind", [of_pandas, of_arrow])
def test_other_rows_of_a_table_are_found(kind: Callable[[int], Any]) -> None:
    table = kind(1)
    told = holdings.of(first := DataLoader(Rows(table=table))).told()
    check(DataLoader(Rows(table=kind(1))), told)
    with pytest.raises(UnprovedError, match=r"dataset\.table"):
        check(DataLoader(Rows(table=kind(-1))), told)
    assert first is not None


# ---------------------------------------------------------------- what is no row


def with_gaps(filled: int) -> Any:
    """Records of equal fields; what is between them was there before."""
    found = np.full(20 * RECORD.itemsize, filled % 256, dtype=np.uint8).view(RECORD)
    found["few"], found["many"] = 1, 2.0
    return found


OF_THIS_PROCESS: dict[str, Callable[[int], Any]] = {
    "a number": lambda n: DataLoader(Rows(started=n)),
    "a name": lambda n: DataLoader(Rows(folder=f"/tmp/x{n}")),
    "a few of them": lambda n: DataLoader(Rows(of=[n, "host", 29500 + n])),
    "a folder of the files": lambda n: DataLoader(Rows(rows=[f"/scratch/{n}/{k}.png" for k in range(ROWS)])),
    "a generator": lambda n: DataLoader(Rows(chance=np.random.default_rng(n + 5), other=torch.Generator())),
    "settings": lambda n: DataLoader(Rows(settings=dict.fromkeys("abcdefg", 3) | {"out": f"runs/{n}", "port": n})),
    "an environment": lambda n: DataLoader(Rows(environment={f"NAME_{k}": f"/tmp/{n}" for k in range(ROWS)})),
    "a logger": lambda n: DataLoader(Rows(log=logging.getLogger(f"of {n}"))),
    "paths in rows": lambda n: DataLoader(Rows(rows=[(f"/x/{n}/{k}.png", k) for k in range(ROWS)])),
    "path objects": lambda n: DataLoader(Rows(rows=[Path(f"/x/{n}/{k}.png") for k in range(ROWS)])),
    "paths in dicts": lambda n: DataLoader(Rows(rows=[{"x": f"/x/{n}/{k}.png", "y": k} for k in range(ROWS)])),
    "paths in an array": lambda n: DataLoader(Rows(rows=np.array([f"/x/{n}/{k}.png" for k in range(ROWS)]))),
    "gaps between fields": lambda n: DataLoader(Rows(rows=with_gaps(n))),
    "a set of objects": lambda _: DataLoader(Rows(rows={Sample([1], 2), *"abcdefgh"})),
    "a lock": lambda _: DataLoader(Rows(lock=threading.Lock())),
    "a module": lambda _: DataLoader(Rows(features=torch.nn.Linear(30, 30))),
    "what comes later": lambda n: DataLoader(Rows(cache={k: k for k in range(ROWS)} if n == 1 else {})),
    "what is empty at first": lambda n: DataLoader(Rows(cache=[n] * ROWS if n == 1 else [None] * ROWS)),
    "what is not there at first": lambda n: DataLoader(Rows(cache=[n] * ROWS if n == 1 else None)),
}  # fmt: skip


@pytest.mark.parametrize("kind", OF_THIS_PROCESS)
def test_what_is_of_this_process_is_not_compared(kind: str) -> None:
    make = OF_THIS_PROCESS[kind]
    told = holdings.of(first := make(1)).told()
    other = make(-1)
    holdings.of(other).check(told)
    assert first is not other


@pytest.mark.parametrize("step", ["replace", "in place", "remove"])
@pytest.mark.parametrize("kind", ["list", "tensor", "array"])
def test_what_changes_is_no_longer_told(kind: str, step: str) -> None:
    rows: Any = Rows(rows={"list": last_one(1), "tensor": tail(1), "array": array(1)}[kind], kept=last_one(5))
    found = holdings.of(loader := DataLoader(rows))
    begun = found.told()
    fresh: Any = Rows(rows={"list": last_one(2), "tensor": tail(2), "array": array(2)}[kind], kept=last_one(5))
    if step == "replace":
        rows.rows = fresh.rows
    elif step == "in place":
        rows.rows[3] = 77
    else:
        del rows.rows
    later = found.told()
    assert later, "what has not changed is still told"
    assert later != begun
    check(DataLoader(fresh), later)
    with pytest.raises(UnprovedError):
        check(DataLoader(fresh), begun)
    assert loader is not None


def test_what_a_predecessor_did_not_tell_is_not_told_by_its_replacement() -> None:
    """It changes: at the beginning of this worker's first loop it is not what it will be in others."""
    rows: Any = Rows(order=last_one(1), kept=last_one(5))
    found = holdings.of(loader := DataLoader(rows))
    found.told()
    rows.order = last_one(2)
    second = holdings.of(other := DataLoader(Rows(order=last_one(3), kept=last_one(5))))
    second.check(told := found.told())
    assert second.told() == told
    assert loader is not other


def test_a_large_array_that_changes_between_the_pieces_is_read_anew_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows: Any = Rows(rows=np.zeros(8 << 20, dtype=np.uint8))
    found = holdings.of(loader := DataLoader(rows))
    begun = found.told()
    rows.rows[(8 << 20) - 5000] = 1
    monkeypatch.setattr(holdings, "SHARE", 0)
    assert found.told() != begun
    assert loader is not None


def test_the_longest_are_told() -> None:
    many = {f"rows{k}": list(range(10 + k)) for k in range(100)}
    told = told_by(DataLoader(Rows(**many)))
    assert b"rows99" in told
    assert b"rows10" not in told


# ---------------------------------------------------------------- functions around a loop

TOKENS = np.arange(1 << 19)
FEW = np.arange(100)


def batch_at(index: int) -> Any:
    return TOKENS[index], FEW


def test_arrays_of_the_functions_around_a_loop_are_told() -> None:
    """In a variable, and in a global that a function uses which is called."""
    data = torch.zeros(1 << 19)
    small, of_model = torch.zeros(10), torch.zeros(1 << 19, requires_grad=True)
    found = holdings.of_functions(sys._getframe())
    told = found.told()
    assert b"data of test" in told
    assert b"TOKENS" in told
    assert b"FEW" not in told
    assert b"small" not in told
    assert b"of_model" not in told
    assert batch_at(0)[0] == 0
    data[5] = 1
    assert b"data of" not in found.told()
    assert small.numel() < of_model.numel()


def test_arrays_in_dicts_and_objects_of_functions_are_told() -> None:
    inside, store = {"train": torch.zeros(1 << 19)}, Sample([1], 2)
    vars(store)["tokens"] = np.zeros(1 << 19)
    told = holdings.of_functions(sys._getframe()).told()
    assert b"inside of test" in told
    assert b".tokens" in told
    assert len(inside) == 1


# ---------------------------------------------------------------- caches, by several loops


class Caching(Dataset[Any]):
    """One that remembers its rows."""

    def __init__(self, kind: str) -> None:
        self.cache: Any = {"dict": {}, "list": [None] * ROWS, "none": None, "tensor": torch.zeros(ROWS, 300)}[kind]

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        if self.cache is None:
            self.cache = torch.zeros(ROWS, 300)
        self.cache[index] = torch.full((300,), float(index))
        return self.cache[index]


@pytest.mark.parametrize("kind", ["dict", "list", "none", "tensor"])
def test_a_cache_that_another_loop_has_filled_is_not_told(kind: str) -> None:
    """Training fills it; then validation begins for the first time, over the same data set."""
    data = Caching(kind)
    training, validation = DataLoader(Subset(data, range(30))), DataLoader(Subset(data, range(30, ROWS)))
    holdings.of(training).told()
    assert len(list(training)) == 30
    told = holdings.of(validation).told()
    fresh = Caching(kind)
    first, second = DataLoader(Subset(fresh, range(30))), DataLoader(Subset(fresh, range(30, ROWS)))
    next(iter(first))  # the last item of the loop that had ended
    holdings.of(second).check(told)
    assert len(holdings.of(anew := DataLoader(data)).told()) == 0
    assert anew is not None


def test_how_much_counts_stays_as_it_was_when_another_one_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdings, "ROOM", 12 << 20)
    rows: Any = Rows(cache=np.zeros(10 << 20, dtype=np.uint8), rows=np.arange(1 << 20))
    found = holdings.of(loader := DataLoader(rows))
    found.told()
    rows.cache[:] = 1
    later = found.told()
    assert b"rows" in later
    assert b"cache" not in later
    check(DataLoader(Rows(cache=np.zeros(10 << 20, dtype=np.uint8), rows=np.arange(1 << 20))), later)
    assert found.told() == later
    assert loader is not None


# ---------------------------------------------------------------- what raises


class Raising:
    """Whatever is asked of it raises."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"{name} is not to be had")


class NoList(list[int]):
    def __iter__(self) -> Iterator[int]:
        raise RuntimeError("it cannot be gone through")


def nested(depth: int) -> list[Any]:
    """Lists in lists; without a depth one that is in itself."""
    found: list[Any] = list(range(ROWS))
    if not depth:
        found.append(found)
    for _ in range(depth):
        found = [found]
    return found


RAISING: dict[str, Callable[[], Any]] = {
    "an object": Raising,
    "a list": lambda: NoList(range(ROWS)),
    "in a list": lambda: [Raising() for _ in range(ROWS)],
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "without elements": lambda: torch.zeros(0),
    "on no device": lambda: torch.zeros(3, device="meta"),
    "deep": lambda: nested(5000),
    "not made yet": lambda: torch.nn.parameter.UninitializedParameter(),
    "in itself": lambda: nested(0),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", RAISING)
def test_what_cannot_be_read_ends_no_script(kind: str) -> None:
    rows: Any = Rows(odd=RAISING[kind](), kept=last_one(5))
    found = holdings.of(loader := DataLoader(rows))
    told = found.told()
    assert b"kept" in told
    assert found.told() == told
    check(DataLoader(Rows(odd=RAISING[kind](), kept=last_one(5))), told)
    odd = RAISING[kind]()
    assert holdings.of_functions(sys._getframe()).told() is not None
    assert loader is not odd
