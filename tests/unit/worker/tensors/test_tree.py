"""Plain values and the bytes of tensors come back as they were, or are refused by name."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchrelay.worker.tensors import memory, tree

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text()) | st.booleans()
TREES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner)
        | st.builds(collections.deque, st.lists(inner), st.sampled_from([None, 3]))
        | st.frozensets(st.integers() | st.text())
        | st.sets(st.integers())
    ),
    max_leaves=20,
)


def same(a: Any, b: Any) -> bool:
    """Equal, and of equal types all the way down (1, 1.0 and True are three things)."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items(), strict=True)
        return len(a) == len(b) and all(same(k, m) and same(v, w) for (k, v), (m, w) in pairs)
    if isinstance(a, (list, tuple, collections.deque)):
        return len(a) == len(b) and all(same(v, w) for v, w in zip(a, b, strict=True))
    return bool(a == b) and str(a) == str(b) if not isinstance(a, (set, frozenset)) else bool(a == b)


@given(TREES)
@settings(max_examples=200, deadline=None)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    data, tensors = tree.encode(value)
    assert tensors == []
    assert same(tree.decode(data), value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.0, 5e-324, 0.1 + 0.2, 1 << 63, -(1 << 200), "\ud7ff", 1])
def test_numbers_are_exact(value: Any) -> None:
    back = tree.decode(tree.encode(value)[0])
    assert type(back) is type(value)
    assert back == value or (math.isnan(back) and math.isnan(value))
    assert math.copysign(1, back) == math.copysign(1, value) if isinstance(value, float) else True


def test_types_of_torch_and_numpy_come_back() -> None:
    value = {
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "scalar": np.float32(0.1),
        "time": np.datetime64("2026-01-01"),
        "counter": collections.Counter("hello"),
        "ordered": collections.OrderedDict(b=1, a=2),
        "range": range(1, 9, 2),
        "bytes": bytearray(b"x"),
    }
    back = tree.decode(tree.encode(value)[0])
    assert back == value
    assert [type(back[key]) for key in value] == [type(one) for one in value.values()]
    assert list(back["ordered"]) == ["b", "a"]


def test_a_state_dict_keeps_the_versions_of_its_modules() -> None:
    given_dict = nn.BatchNorm1d(2).state_dict()
    back = tree.decode(tree.encode(given_dict)[0])
    assert back._metadata == given_dict._metadata  # type: ignore[attr-defined]


class Foo:
    pass


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (Foo(), "state"),
        ({"a": [1, Foo()]}, r"state\['a'\]\[1\]"),
        ({"a": {3: Text("x")}}, r"state\['a'\]\[3\]"),
        ({Foo: 1}, "state key"),
        ({"f": len}, r"state\['f'\]"),
        ({"o": np.array([Foo()])}, r"state\['o'\]"),
        ([torch.eye(3).to_sparse()], r"state\[0\] is a sparse"),
        ([torch.empty(3, device="meta")], r"state\[0\] is on the meta device"),
        ([torch.arange(5).as_strided((3, 3), (1, 1))], r"state\[0\] overlaps"),
        ([nn.LazyLinear(3).weight], r"state\[0\] has no shape yet"),
        ([{torch.eye(3)}], r"state\[0\]\[0\] is a tensor in a set"),
        ("\ud800", "state is no valid text"),
    ],
)
def test_what_cannot_be_carried_is_refused_by_its_path(value: Any, path: str) -> None:
    with pytest.raises(TypeError, match=path):
        tree.encode(value)


def test_a_tree_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(TypeError, match="contain itself"):
        tree.encode(value)


@given(st.binary(max_size=60))
@settings(max_examples=300, deadline=None)
def test_bytes_that_are_no_tree_raise_nothing_but_a_value_error(data: bytes) -> None:
    try:
        tree.decode(data)
    except ValueError:
        pass


@given(TREES, st.data())
@settings(max_examples=200, deadline=None)
def test_a_tree_that_was_tampered_with_raises_nothing_but_a_value_error(value: Any, data: st.DataObject) -> None:
    encoded = bytearray(tree.encode([value, torch.zeros(3)])[0])
    position = data.draw(st.integers(0, len(encoded) - 1))
    encoded[position] = data.draw(st.integers(0, 255))
    try:
        tree.decode(encoded)
    except ValueError:
        pass


@pytest.mark.parametrize(
    "node",
    [["V", "float32"], ["V", "cpu:-7"], ["V", 99999], ["q", 2**63, 1], ["r", 0, 1, 0], ["D", "zeros"]],
)
def test_values_that_cannot_be_are_no_tree(node: list[object]) -> None:
    with pytest.raises(ValueError, match="no state tree"):
        tree.decode(msgspec.msgpack.encode(node))


def test_shared_tensors_travel_once() -> None:
    one = torch.zeros(4)
    _, tensors = tree.encode([one, one, {"again": one.view(4)}, one.view(2, 2), torch.zeros(0), torch.zeros(0)])
    assert len(tensors) == 4  # another shape of the same memory is another tensor, and empty ones lie nowhere


# ---------------------------------------------------------------- memory

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda t: t,
    "turned": lambda t: t.permute(2, 0, 1),
    "channels last": lambda t: t[None].contiguous(memory_format=torch.channels_last)[0],
    "gaps": lambda t: t[:, 1:3, ::2],
    "row": lambda t: t[1],
    "every third": lambda t: t.flatten()[::3],
    "expanded": lambda t: t[:, None].expand(-1, 5, -1, -1),
    "one": lambda t: t[0, 0, 0],
    "none": lambda t: t[:0],
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn, torch.uint16],
)
def test_bytes_of_every_layout_and_dtype_land_where_they_belong(layout: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    full, blank = (torch.randint(0, 2, (3, 4, 6), generator=generator).to(dtype) for _ in range(2))
    source, target = LAYOUTS[layout](full), LAYOUTS[layout](blank)
    assert memory.refusal(source) is None
    data, tensors = tree.encode([source])
    (leaf,) = tree.decode(data)
    assert (leaf.dtype, leaf.shape, leaf.strides) == (dtype, tuple(source.shape), memory.strides(source))
    sent = b"".join(memory.outgoing(tensors[0]))
    assert len(sent) == memory.size(source)
    at = 0
    for view, filled in memory.incoming(target):
        view[:] = sent[at : at + len(view)]
        at += len(view)
        if filled is not None:
            filled()
    assert at == len(sent)
    # By bytes: == is not there for every dtype.
    assert bytes(_bytes(target)) == bytes(_bytes(source))


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy()


def test_dense_memory_is_not_copied() -> None:
    tensor = torch.zeros(5, 7).t()
    (view,) = memory.outgoing(tensor)
    tensor[2, 3] = 1.0
    assert any(view)


def test_memory_beside_a_gappy_tensor_is_left_alone() -> None:
    full = torch.zeros(6, 6)
    for view, filled in memory.incoming(full[::2, 1::2]):
        view[:] = b"\xff" * len(view)
        if filled is not None:
            filled()
    assert int((full != 0).sum()) == 9
