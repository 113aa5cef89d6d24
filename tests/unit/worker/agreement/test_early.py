"""Which tensors are compared after the first steps, when, and what is said of those that differ."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from torchrelay.protocol.messages.ids import Point
from torchrelay.worker.agreement.comparing import Early
from torchrelay.worker.state import layout
from torchrelay.worker.state.state import State


@pytest.fixture(autouse=True)
def rank_of_two() -> Iterator[None]:
    dist.init_process_group("fake", store=HashStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def supposed(model: object, optimizer: torch.optim.Optimizer | None = None) -> list[str]:
    return [name for name, _ in layout.supposed(State(model, optimizer))]  # type: ignore[arg-type]


def test_what_ddp_or_a_mesh_tells_of_is_not_compared() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    sharded = nn.Linear(4, 4)
    fully_shard(sharded, mesh=mesh)
    models = {"ddp": DistributedDataParallel(nn.Linear(4, 4)), "sharded": sharded, "plain": nn.Linear(4, 4, bias=False)}
    assert supposed(models) == ["model['plain'].weight"]


def test_what_is_frozen_or_no_parameter_is_not_compared() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[0].weight.requires_grad_(False)
    assert supposed(model) == ["model.0.bias", "model.1.weight", "model.1.bias"]


def test_what_ddp_ignores_is_compared() -> None:
    core = nn.Linear(4, 4)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(core, ["bias"])  # type: ignore[no-untyped-call]
    assert supposed(DistributedDataParallel(core)) == ["model.bias"]


def test_parameters_that_only_an_optimizer_knows_are_compared() -> None:
    prompt = nn.Parameter(torch.zeros(3))
    named = supposed(DistributedDataParallel(nn.Linear(4, 4)), torch.optim.SGD([prompt], lr=0.1))
    assert named == ["parameter 0 of optimizer 0"]


def test_it_is_compared_before_the_second_third_fifth_and_ninth_update() -> None:
    early = Early(State(nn.Linear(4, 4)), "all")
    assert [step for step in range(1, 100) if early.look(Point(step)) is not None] == [2, 3, 5, 9]


def test_the_lines_tell_every_value() -> None:
    model = nn.Linear(4, 4)
    early = Early(State(model), "all")
    before = early.values()
    assert before == early.values()
    with torch.no_grad():
        model.bias[2] += 1
    assert [one == other for one, other in zip(before, early.values(), strict=True)] == [True, False]
