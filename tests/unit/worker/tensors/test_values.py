"""What a call returns comes out of a record as it went in; what cannot be carried is named."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from torchrelay.errors import RefusedError, UnprovedError
from torchrelay.worker.retry import late
from torchrelay.worker.state.private import Private
from torchrelay.worker.tensors import values

VALUES: list[Any] = [
    None,
    0,
    -(1 << 70),
    1.5,
    float("inf"),
    "text",
    b"bytes",
    (1, [2, {"three": 4}]),
    OrderedDict(a=1),
    {"loss": 0.25, 3: [None, True]},
]
TENSORS = [
    torch.tensor(0.1),
    torch.tensor([[7]], dtype=torch.int64),
    torch.tensor(True),
    torch.tensor(0.1, dtype=torch.bfloat16),
    torch.arange(12.0).reshape(3, 4).t(),
    torch.zeros(0, 3),
    torch.tensor(2.0, requires_grad=True),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_values_come_back(value: Any) -> None:
    found = values.decode(values.encode(value, "result"))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("tensor", TENSORS, ids=str)
def test_tensors_come_back(tensor: torch.Tensor) -> None:
    for value in (tensor, {"in": [tensor, (tensor,)]}):
        found = values.decode(values.encode(value, "result"))
        first = found if value is tensor else found["in"][1][0]
        assert torch.equal(first, tensor.detach())
        assert (first.dtype, first.shape, first.requires_grad) == (tensor.dtype, tensor.shape, False)


def test_arrays_come_back() -> None:
    array = np.arange(6.0).reshape(2, 3)
    assert np.array_equal(values.decode(values.encode(array, "result")), array)


def test_what_comes_back_is_no_view_of_the_bytes() -> None:
    data = values.encode(torch.tensor(1.0), "result")
    values.decode(data).add_(1)
    assert values.decode(data).item() == 1.0


@pytest.mark.parametrize("value", [object(), [print], {"a": {"b": iter(())}}])
def test_what_cannot_be_carried_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match="the result"):
        values.encode(value, "the result")


@pytest.mark.parametrize(
    "data", [b"x", b"t", b"n", b"t\xc1", b"n\x93\xa3abc\x90\xc4\x00", values.encode([1], "x")[:-1]]
)
def test_bytes_that_are_no_value_are_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"value|tree"):
        values.decode(data)


# ---------------------------------------------------------------- late buffers


class Followed(torch.nn.Module):
    """BatchNorm, and buffers of the same kind that follow it after the update."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.copy = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)


def private_of(module: torch.nn.Module) -> Private:
    return Private([("model", module)], [])


def forward(module: Followed) -> None:
    module.norm(torch.randn(4, 3))


def follow(module: Followed) -> None:
    for to, origin in zip(module.copy.buffers(), module.norm.buffers(), strict=True):
        to.copy_(origin)


def test_a_buffer_that_follows_another_is_made_again() -> None:
    torch.manual_seed(1)
    module = Followed()
    private = private_of(module)
    forward(module)
    at_gate = private.record()
    follow(module)
    copies, shared = late.look(at_gate, private.record())
    assert shared == []
    assert copies == {f"model.copy.{name}": f"model.norm.{name}" for name, _ in module.norm.named_buffers()}

    replacement = Followed()
    theirs = private_of(replacement)
    theirs.load(at_gate)
    late.make_again(theirs, copies)
    assert theirs.record() == private.record()


def test_a_buffer_that_changes_in_its_own_way_is_refused() -> None:
    module = Followed()
    private = private_of(module)
    at_gate = private.record()
    forward(module)
    with pytest.raises(RefusedError, match="after the step function has returned"):
        late.look(at_gate, private.record())


def test_nothing_is_made_again_if_nothing_is_late() -> None:
    module = Followed()
    private = private_of(module)
    forward(module)
    record = private.record()
    assert late.look(record, record) == ({}, [])
    late.make_again(private, {})
    assert private.record() == record


class Counted(torch.nn.Module):
    """A buffer that its update counts up, as averages do; and one that a forward pass counts."""

    updates: torch.Tensor
    passes: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        self.register_buffer("passes", torch.full((), 7, dtype=torch.int64))


def test_what_the_update_alone_changes_is_not_private_if_that_was_not_known_yet() -> None:
    module = Counted()
    private = private_of(module)
    module.passes += 1
    at_gate = private.record()
    module.updates += 1
    unknown = private.unknown(["model.passes"])
    assert unknown == {"model.updates"}
    assert late.look(at_gate, private.record(), unknown) == ({}, ["model.updates"])
    private.share(["model.updates"])
    replacement = Counted()
    theirs = private_of(replacement)
    theirs.load(private.record())
    assert (int(replacement.passes), int(replacement.updates)) == (8, 0)  # a replica has the other
    assert theirs.unknown([]) == set()
    module.passes += 1
    with pytest.raises(RefusedError, match=r"model\.passes differs between ranks"):
        late.look(at_gate, private.record(), private.unknown(["model.passes"]))
    private.settle(["model.passes"], sections=False)
    assert private.unknown([]) == set()


def test_who_dies_before_it_is_known_what_is_late_cannot_be_followed() -> None:
    with pytest.raises(UnprovedError, match="first update"):
        late.make_again(private_of(Followed()), None)
    late.make_again(private_of(torch.nn.Linear(2, 2)), None)
