"""What a step is called with is told without its values, and made again elsewhere; or it is said why not."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import OrderedDict, namedtuple
from typing import Any, NamedTuple

import pytest
import torch

from torchrelay.worker.replacement import examples
from torchrelay.worker.replacement.examples import EVERY, MAX_STEPS, Example, Examples, NotRehearsable, example_of

CPU = torch.device("cpu")


class Batch(NamedTuple):
    """A named tuple of this module."""

    x: Any
    y: Any


def again(*args: Any, **kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
    """Described, sent, and made again."""
    shown = Examples()
    shown.add(again).look(args, kwargs)
    (example,) = examples.decode(shown.encoded()).examples
    return examples.arguments(example, CPU)


def looks(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, 3),
        torch.ones(4, dtype=torch.bfloat16, requires_grad=True),
        torch.full((5, 1), 7),
        torch.ones(2, dtype=torch.bool),
        torch.ones((), dtype=torch.float64),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(2, 0, dtype=torch.uint8),
        torch.ones(2).to(torch.float8_e4m3fn),
    ],
    ids=str,
)
def test_tensors_look_the_same(tensor: torch.Tensor) -> None:
    (made,), _ = again(tensor)
    assert looks(made) == looks(tensor)
    if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
        assert not made.any(), "zeros are valid as indices"


def test_structure_and_plain_values_are_as_they_were() -> None:
    x = torch.ones(3)
    (batch, weight, rest), kwargs = again(
        {"x": x, 3: [x, (x, None)], "pair": Batch(x, "label")}, 0.5, (), mask=None, flags=[True, -1, b"\0", "text"]
    )
    assert list(batch) == ["x", 3, "pair"]
    assert type(batch[3]) is list
    assert type(batch[3][1]) is tuple
    assert batch[3][1][1] is None
    assert type(batch["pair"]) is Batch
    assert batch["pair"].y == "label"
    assert (weight, rest, kwargs) == (0.5, (), {"mask": None, "flags": [True, -1, b"\0", "text"]})


class Own:
    """Something of the script's."""


class Hostile(tuple[Any, ...]):
    """A named tuple of the script's own making, which cannot even be complained about."""

    _fields = property(lambda _: None)


def ragged() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is a prototype
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def cyclic() -> list[Any]:
    items: list[Any] = []
    items.append(items)
    return items


def deep() -> dict[str, Any]:
    top: dict[str, Any] = {}
    inner = top
    for _ in range(600):
        inner["a"] = inner = {}
    return top


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Own(), r"argument 0 is a .*Own"),
        ([1, {"a": Own()}], r"argument 0\[1\]\['a'\] is a .*Own"),
        ({(1, 2): 3}, "argument 0 is a tuple"),
        (Batch(1, {2}), "argument 0.y is a set"),
        (OrderedDict(a=1), "OrderedDict"),
        (torch.ones(2).to_sparse(), "no plain dense tensor"),
        (torch.ones(2, device="meta"), "no plain dense tensor"),
        (torch.nn.Parameter(torch.ones(2)), "Parameter"),
        (1 << 70, "too large a int"),
        ("x" * 100_000, "too large a str"),
        ([0] * 10_000, "more than 4096 parts"),
        (ragged(), "no plain dense tensor"),
        (cyclic(), "nested more than 32 deep"),
        (deep(), "nested more than 32 deep"),
        (Hostile((1,)), "cannot be described: TypeError"),
        ("\ud800", "cannot be described: UnicodeEncodeError"),
        ({"\ud800": 1}, "cannot be described: UnicodeEncodeError"),
        ({"\ud800": Own()}, r"argument 0\['\\ud800'\] is a .*Own"),
    ],
)
def test_what_cannot_be_made_elsewhere_is_told(value: Any, words: str) -> None:
    with pytest.raises(NotRehearsable, match=words):
        again(value)


def test_a_named_tuple_that_is_not_known_here_is_told() -> None:
    strange = namedtuple("strange", "x")  # made in a function: nobody can find it
    with pytest.raises(NotRehearsable, match="strange is not known here"):
        again(strange(1))


def test_a_device_that_is_not_here_is_told() -> None:
    example = Example("f", [examples.Looks((1,), "float32", "cuda", False)], called=True)
    with pytest.raises(NotRehearsable, match="on a cuda"):
        examples.arguments(example, CPU)


def test_batches_are_not_kept_alive() -> None:
    shown = Examples()
    batch = torch.ones(3)
    shown.add(again).look((batch,), {"y": [batch]})
    gone = weakref.ref(batch)
    del batch
    gc.collect()
    assert gone() is None


def test_functions_are_let_go_of_and_only_so_many_are_told_apart() -> None:
    shown = Examples(keep=True)
    for _ in range(MAX_STEPS + 3):
        shown.add(again)
    assert shown.functions() == [again] * MAX_STEPS
    assert shown.functions() == []
    assert not shown.encoded(), "none of them was called"


def test_a_later_call_is_told_in_its_turn() -> None:
    shown = Examples()
    step = shown.add(again)
    for size in range(1, EVERY + 3):
        step.look((torch.ones(size),), {})
    (example,) = examples.decode(shown.encoded()).examples
    assert example.args == [examples.Looks((EVERY + 1,), "float32", "cpu", False)]


def test_garbage_is_no_example() -> None:
    with pytest.raises(ValueError, match="3 bytes that are no examples"):
        examples.decode(b"\xc1ab")


def test_strange_names_travel_too() -> None:
    shown = Examples()
    shown.add(again).look((), {"\ud800": Own()})
    (example,) = examples.decode(shown.encoded()).examples
    assert example.refusal.startswith(r"argument \ud800 is a ")


def test_a_refusal_travels() -> None:
    assert example_of("f", (Own(),), {}).refusal.startswith("argument 0 is a ")
