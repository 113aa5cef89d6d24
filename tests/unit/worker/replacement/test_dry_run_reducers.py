"""Which of DDP's reducers stay after a rehearsal: those that have gone up to a gate, and through nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from torchrelay.worker.parallel import ddp
from torchrelay.worker.replacement import dry_run
from torchrelay.worker.replacement.dry_run import AtGate, PlaceAsked
from torchrelay.worker.replacement.examples import Told, example_of, name_of
from torchrelay.worker.state.state import State

X = torch.ones(2, 4)


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """A world of one."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Branching(torch.nn.Module):
    """Uses its second layer only when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.both = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) if self.both else self.first(x)  # type: ignore[no-any-return]


def built(*, unused: bool = False) -> tuple[DistributedDataParallel, State]:
    torch.manual_seed(0)
    wrapper = DistributedDataParallel(Branching(), find_unused_parameters=unused)
    return wrapper, State(wrapper, torch.optim.SGD(wrapper.parameters(), lr=0.1))


def trained_layout(*, unused: bool) -> ddp.Layout:
    wrapper, _ = built(unused=unused)
    wrapper(X).sum().backward()
    ddp.settle(wrapper)
    return ddp.layout(wrapper)


def prepare(state: State, step: Callable[[torch.Tensor], None], layouts: list[ddp.Layout]) -> bool:
    session: Any = SimpleNamespace(
        rehearsing=False,
        worker="w",
        agent=SimpleNamespace(say=lambda _: None),
        position=SimpleNamespace(order=lambda _: None, poisoned=False, rest=lambda *_, **__: None),
        identity=SimpleNamespace(assigned_cpu_s=0.0),
    )
    told = Told([example_of(name_of(step), (X,), {})], [], layouts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dry_run, "_fetch", lambda _: told)
        return dry_run.prepare(session, state, [step], lambda function, args, _: function(*args))


@pytest.mark.parametrize("unused", [False, True])
def test_after_a_step_up_to_its_gate_they_stay(unused: bool) -> None:
    wrapper, state = built(unused=unused)
    layout = trained_layout(unused=unused)

    def step(x: torch.Tensor) -> None:
        wrapper(x).sum().backward()
        kept(wrapper.reducer)
        raise AtGate

    kept = Mock()  # what a step puts into a list is taken out again after a rehearsal
    assert prepare(state, step, [layout])
    assert kept.call_args_list == [call(wrapper.reducer)]
    assert ddp.adopt(wrapper, layout)


@pytest.mark.parametrize("end", [None, PlaceAsked(), ValueError("the script's")])
def test_after_anything_else_they_are_fresh(end: BaseException | None) -> None:
    """A pass without communication counts which parameters were used, and nothing of torch's tells that it has."""
    wrapper, state = built(unused=True)

    def step(x: torch.Tensor) -> None:
        used(wrapper.reducer)
        with wrapper.no_sync():
            wrapper(x).sum().backward()
        if end is not None:
            raise end

    used = Mock()
    assert prepare(state, step, [trained_layout(unused=True)]) is (end is None)
    assert wrapper.reducer is not used.call_args_list[0].args[0]
    wrapper.module.both = False
    wrapper.zero_grad()
    wrapper(X).sum().backward()
    assert wrapper.module.second.weight.grad is None, "nobody has used it"


def test_where_nothing_is_told_of_buckets_nothing_may_stay() -> None:
    wrapper, state = built()

    def step(x: torch.Tensor) -> None:
        wrapper(x).sum().backward()
        raise AtGate

    assert not prepare(state, step, [])
