"""The digests of what calls are made with: equal for equal values in any process, others for other values."""

from __future__ import annotations

import datetime
import decimal
import enum
import pathlib
import random
import subprocess
import sys
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torchrelay.worker.tensors import arguments
from torchrelay.worker.tensors.arguments import MAX_ENTRIES, SIZE, WHOLE, differing, digest, digests, names_of

Pair = namedtuple("Pair", ("x", "y"))


@dataclass
class Sample:
    x: torch.Tensor
    count: int


class Batch:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x
        self.pinned = False


class Trainer:
    def __init__(self, count: int) -> None:
        self.model = nn.Linear(2, 2)
        self.count = count


def tensor(seed: int = 0, *shape: int) -> torch.Tensor:
    return torch.randn(shape or (4, 3), generator=torch.Generator().manual_seed(seed))


def changed(value: torch.Tensor, at: int) -> torch.Tensor:
    other = value.clone()
    other.view(-1)[at] += 1
    return other


DIFFERENT: list[tuple[Any, Any]] = [
    (1, 2),
    (1, 1.0),
    (True, 1),
    (None, 0),
    ("a", b"a"),
    (0.0, -0.0),
    ([1, 2], (1, [2])),
    ([1, 23], [12, 3]),
    ({"a": 1}, {"a": 2}),
    ({"a": 1}, {"b": 1}),
    (tensor(1), tensor(2)),
    (tensor(1), tensor(1).double()),
    (tensor(1), tensor(1).T),
    (tensor(1), changed(tensor(1), 11)),
    (tensor(1).bfloat16(), tensor(2).bfloat16()),
    (tensor(1).to_sparse(), tensor(2).to_sparse()),
    (tensor(1).numpy(), tensor(2).numpy()),
    (np.float64(1), np.float32(1)),
    (np.array(["a", None], object), np.array(["b", None], object)),
    (Pair(1, tensor(1)), Pair(1, tensor(2))),
    (Sample(tensor(1), 2), Sample(tensor(1), 3)),
    (Batch(tensor(1)), Batch(tensor(2))),
    (UserDict(ids=tensor(1)), UserDict(ids=tensor(2))),
    ({1, 2, 3}, {1, 2, 4}),
    (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
    (np.random.default_rng(1), np.random.default_rng(2)),
    (np.random.RandomState(1), np.random.RandomState(2)),
    (random.Random(1), random.Random(2)),
    (range(3), range(4)),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_other_values_have_other_digests(one: Any, other: Any) -> None:
    assert digest(one) != digest(other)
    assert len(digest(one)) == SIZE


@pytest.mark.parametrize("build", [lambda at=at: DIFFERENT[at][0] for at in range(len(DIFFERENT))])
def test_the_same_value_has_the_same_digest(build: Any) -> None:
    assert digest(build()) == digest(build())


def test_it_is_the_bytes_that_count_and_not_where_they_lie() -> None:
    whole = tensor(1, 8, 6)
    assert digest(whole[2:4]) == digest(whole[2:4].clone())
    assert digest(OrderedDict(a=1)) == digest({"a": 1})


def test_a_large_tensor_that_differs_as_batches_do_has_another_digest() -> None:
    big = tensor(1, WHOLE)
    assert digest(big) == digest(big.clone())
    assert digest(big) != digest(tensor(2, WHOLE))
    assert digest(big) != digest(changed(big, 0))
    assert digest(big) != digest(changed(big, -1)), "its first and last pieces count"
    turned = big.view(1024, -1).T
    assert digest(turned) != digest(tensor(2, WHOLE).view(1024, -1).T)
    assert digest(big.numpy()) != digest(tensor(2, WHOLE).numpy())


def test_an_object_that_does_something_counts_by_its_type_only() -> None:
    assert digest(Trainer(1)) == digest(Trainer(2)), "its model has other values on a replacement that has no state yet"
    assert digest(nn.Linear(2, 2)) == digest(nn.Linear(2, 2))
    assert digest(print) != digest(len)


def test_what_holds_itself_or_is_deep_ends() -> None:
    own: list[Any] = []
    own.append(own)
    deep: Any = 1
    for _ in range(10_000):
        deep = [deep]
    assert len(digest(own)) == len(digest(deep)) == SIZE


@pytest.mark.slow
def test_the_order_of_a_set_means_nothing_in_another_process() -> None:
    code = (
        "from torchrelay.worker.tensors.arguments import digest\n"
        "print(digest({'a', 'bc', 'def', (1, 'x')}).hex(), digest({'k': 1.5, 'l': 'text'}).hex())"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1


def test_it_is_told_which_argument_differs() -> None:
    args, kwargs = (tensor(1), 3), {"lr": 0.1, "k": 2}
    recorded = digests("train.step", args, kwargs)
    assert differing(recorded, digests("train.step", args, dict(reversed(kwargs.items())))) == []
    names = names_of(args, kwargs)
    assert [names[at] for at in differing(recorded, digests("train.step", (tensor(2), 3), kwargs))] == ["argument 0"]
    assert [names[at] for at in differing(recorded, digests("train.step", args, {**kwargs, "lr": 0.2}))] == [
        "argument 'lr'"
    ]
    assert [names[at] for at in differing(recorded, digests("train.other", args, kwargs))] == ["the function"]
    assert differing(recorded, digests("train.step", args, {"lr": 0.1})), "an argument is missing"


def test_many_arguments_take_no_more_room() -> None:
    many = digests("f", range(1000), {})
    assert len(many) == MAX_ENTRIES * SIZE
    assert differing(many, digests("f", [*range(999), -1], {})) == [MAX_ENTRIES - 1]
    assert len(names_of(range(1000), {})) == MAX_ENTRIES


class Side(enum.Enum):
    LEFT, RIGHT = "left", "right"


class Shift(enum.IntEnum):
    DAY, NIGHT = 1, 2


class Tokens(list[int]):
    pass


class Path(str):
    def __str__(self) -> str:
        return "hidden"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Side.LEFT, Side.RIGHT),
        (Shift.DAY, Shift.NIGHT),
        (Tokens([1, 2]), Tokens([1, 3])),
        (Path("a"), Path("b")),
        (datetime.date(2020, 1, 1), datetime.date(2020, 1, 2)),
        (pathlib.Path("/data/1.png"), pathlib.Path("/data/2.png")),
        (decimal.Decimal("0.1"), decimal.Decimal("0.2")),
        (range(10**9), range(1, 10**9)),
        (bytearray(b"a" * 5000), bytearray(b"a" * 4999 + b"b")),
        ([10**5000], [10**5000 + 1]),  # more digits than may be shown
        (torch._neg_view(torch.ones(2)), torch._neg_view(torch.full((2,), 2.0))),
    ],
    ids=range(11),
)
def test_values_of_further_kinds_are_told_apart(one: Any, other: Any) -> None:
    assert digest(one) == digest(one)
    assert digest(one) != digest(other)


def test_a_digest_that_waits_for_a_device_is_the_same_each_time() -> None:
    maker = arguments._maker([1, 2])
    maker._away.append(torch.tensor(77))  # a sum under way
    first = maker.finish()
    assert maker.finish() == first
    assert first != arguments._maker([1, 2]).finish()
