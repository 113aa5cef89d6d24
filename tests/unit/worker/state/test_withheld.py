"""Gradients whose values nobody has are not read: once they are cleared, or added to, they are as any other."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support.plain import free_port
from torchrelay.errors import UnprovedError
from torchrelay.worker.state import gradients
from torchrelay.worker.state.gradients import Gradients
from torchrelay.worker.state.withheld import give_back
from torchrelay.worker.tensors import absent

X = torch.ones(2, 3)


@pytest.fixture(autouse=True)
def nothing_refused() -> Iterator[None]:
    yield
    absent._refused.clear()


def trained(model: nn.Module | None = None) -> nn.Module:
    """A model whose gradients are withheld."""
    model = model or nn.Linear(3, 2)
    model(X).sum().backward()
    named = list(model.named_parameters())
    gradients.put(named, Gradients(bytes([1] * len(named)), {}))
    return model


def grads(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


READS: dict[str, Callable[[nn.Module], object]] = {
    "norm": lambda model: grads(model)[0].norm(),
    "item": lambda model: grads(model)[1][0].item(),
    "clip": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "clone": lambda model: grads(model)[0].clone(),
    "data": lambda model: grads(model)[0].data.sum(),
    "flat": lambda model: torch.cat([each.view(-1) for each in grads(model)]),
    "numpy": lambda model: grads(model)[0].numpy(),
    "detached": lambda model: grads(model)[0].detach().flatten().tolist(),
    "scaled": lambda model: grads(model)[0].mul_(2),
    "added to": lambda model: grads(model)[0].add_(1),
    "row": lambda model: grads(model)[0][0],
    "copied": lambda model: torch.zeros(2, 3).copy_(grads(model)[0]),
    "many": lambda model: torch._foreach_norm(grads(model)),
    "shown": lambda model: repr(grads(model)[0]),
    "asked": lambda model: bool(grads(model)[1][0] > 0),
    "deepcopy": lambda model: copy.deepcopy(grads(model)[0]),
    "into": lambda model: torch.add(torch.zeros(2, 3), grads(model)[0], out=torch.zeros(2, 3)),
    "filled": lambda model: torch.zeros(3).fill_(grads(model)[1].sum()),
    "value": lambda model: torch.zeros(3).fill_(grads(model)[1].view(2)[0]),
    "twice": lambda model: grads(model)[0].mul_(2.0),
    "halves": lambda model: grads(model)[0].chunk(2)[0].sum(),
    "after a collection": lambda model: gc.collect() + grads(model)[0].sum(),
}


@pytest.mark.parametrize("how", READS)
def test_reading_is_refused(how: str) -> None:
    model = trained()
    with pytest.raises(UnprovedError, match=r"reads the gradient of (weight|bias) that an earlier step has left"):
        READS[how](model)
    with pytest.raises(UnprovedError):  # also if the script has caught it
        absent.check()


def cleared(grad: torch.Tensor) -> bool:
    grad[:] = 0.0
    return True


CLEARS: dict[str, Callable[[nn.Module], object]] = {
    "optimizer": lambda model: torch.optim.SGD(model.parameters(), 0.1).zero_grad(set_to_none=False),
    "one by one": lambda model: torch.optim.SGD(model.parameters(), 0.1, foreach=False).zero_grad(set_to_none=False),
    "model": lambda model: model.zero_grad(set_to_none=False),
    "by hand": lambda model: [each.zero_() for each in grads(model)],
    "data": lambda model: [each.data.zero_() for each in grads(model)],
    "detached": lambda model: [each.detach_().zero_() for each in grads(model)],
    "filled": lambda model: [each.fill_(0.0) for each in grads(model)],
    "view": lambda model: [each.view(-1).zero_() for each in grads(model)],
    "rows": lambda model: [cleared(each) for each in grads(model)],
    "sliced": lambda model: [cleared(each.data) for each in grads(model)],
    "times zero": lambda model: [each.mul_(0) for each in grads(model)],
    "in place": lambda model: [each.__imul__(0.0) for each in grads(model)],
    "copied": lambda model: [each.copy_(torch.zeros_like(each)) for each in grads(model)],
}


@pytest.mark.parametrize("how", CLEARS)
def test_clearing_gives_them_back(how: str) -> None:
    model = trained()
    CLEARS[how](model)
    assert [bool(each.any()) for each in grads(model)] == [False, False]
    model(X).sum().backward()
    assert {type(each) for each in grads(model)} == {torch.Tensor}
    assert grads(model)[1].tolist() == [2.0, 2.0]


def test_clearing_a_part_does_not_give_back_the_rest() -> None:
    model = trained()
    with pytest.raises(UnprovedError):
        grads(model)[0].chunk(2)[0].zero_()


def test_so_does_backward() -> None:
    model = trained()
    model(X).sum().backward()
    assert {type(parameter.grad) for parameter in model.parameters()} == {torch.Tensor}, "libraries ask for the class"
    assert nn.utils.clip_grad_norm_(model.parameters(), 100.0) > 1
    assert grads(model)[1].tolist() == [2.0, 2.0]


def test_and_the_optimizer_that_takes_them() -> None:
    model = trained()
    give_back(model.parameters())
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert {type(each) for each in grads(model)} == {torch.Tensor}


def test_what_is_known_is_put_there_and_may_be_read() -> None:
    model = trained()
    named = list(model.named_parameters())
    gradients.put(named, Gradients(b"\1\1", {"bias": torch.tensor([3.0, 4.0])}))
    assert grads(model)[1].tolist() == [3.0, 4.0]
    with pytest.raises(UnprovedError, match="gradient of weight"):
        grads(model)[0].sum()


def test_what_is_known_to_be_zero_may_be_read() -> None:
    model = trained()
    named = list(model.named_parameters())
    give_back(model.parameters())
    gradients.put(named, Gradients(b"\1\1", {}, cleared=True))
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) == 0


def test_what_tells_nothing_of_them_may_be_asked() -> None:
    model = trained()
    grad = grads(model)[0]
    assert (grad.is_sparse_csr, grad.is_pinned(), grad.is_neg()) == (False, False, False)
    assert grad.type() == "torch.FloatTensor"
    assert (grad.shape, grad.device.type, grad.dtype, grad.is_sparse) == ((2, 3), "cpu", torch.float32, False)
    assert torch.zeros_like(grad).sum() == 0
    assert grad is grads(model)[0]


def test_a_model_with_them_is_compiled() -> None:
    model = trained()
    compiled: Any = torch.compile(model, backend="eager")
    assert compiled(X).shape == (2, 2)
    with pytest.raises(UnprovedError):
        grads(model)[0].sum()


@pytest.mark.timeout(60)
def test_shards_are_withheld_too() -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo")
    try:
        sharded = nn.Linear(3, 2)
        fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
        model = trained(sharded)
        with pytest.raises(UnprovedError, match="gradient of weight"):
            grads(model)[0].sum()
        absent._refused.clear()
        model(X).sum().backward()
        assert float(nn.utils.clip_grad_norm_(model.parameters(), 100.0)) > 1
        model = trained(model)
        torch.optim.SGD(model.parameters(), 0.1).zero_grad(set_to_none=False)
        assert not any(bool(each.sum()) for each in grads(model))
    finally:
        dist.destroy_process_group()
