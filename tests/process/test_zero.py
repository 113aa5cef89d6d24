"""ZeroRedundancyOptimizer: whose state it is, what travels, where it gathers, and what is refused: one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the fake backend
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from tests.support.carrying import carry
from torchrelay.worker.parallel import zero
from torchrelay.worker.state import layout
from torchrelay.worker.state.layout import shard_name
from torchrelay.worker.state.state import State

pytestmark = pytest.mark.usefixtures("left_as_found")

WORLD = 4


class Script:
    """A model of four layers, one for each rank to update."""

    def __init__(self, seed: int = 1, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(WORLD)))
        self.optimizer: Any = ZeroRedundancyOptimizer(self.model.parameters(), torch.optim.AdamW, lr=0.1, **options)
        self.state = State(self.model, self.optimizer)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 3)).square().sum().backward()
        self.optimizer.step()


def test_nobody_else_has_a_ranks_part(become: Callable[[int], None]) -> None:
    become(2)
    script = Script()
    assert layout.refusal(script.state) is None
    assert layout.blind(script.state, None) is None
    assert shard_name(script.state, 2, WORLD) == "ranks 2"
    refused = layout.blind(script.state, "mine")
    assert refused is not None
    assert refused[1] == "leave shard= out"


@pytest.mark.parametrize("views", [False, True])
def test_a_ranks_part_travels_and_lands_in_the_optimizer_inside(become: Callable[[int], None], views: bool) -> None:
    become(1)
    source, replacement = (Script(seed, parameters_as_bucket_view=views) for seed in (1, 2))
    for _ in range(3):
        source.step()
    source.optimizer.param_groups[0]["lr"] = 0.05
    source.step()
    carry(source.state, replacement.state)
    assert source.state.digest() == replacement.state.digest()
    kept = replacement.optimizer.optim.state
    assert [parameter for parameter in replacement.model.parameters() if kept.get(parameter)] == [
        replacement.model[1].weight
    ]
    assert replacement.optimizer.optim.param_groups[0]["lr"] == 0.05
    source.step()
    replacement.step()
    assert source.state.digest() == replacement.state.digest()


def test_both_optimizers_are_the_scripts_own(become: Callable[[int], None]) -> None:
    become(0)
    script = Script()
    assert script.state.has_optimizer(script.optimizer)
    assert script.state.has_optimizer(script.optimizer.optim)
    assert script.state.zeros() == [script.optimizer]


class Sent:
    """In place of a broadcast under way."""

    def __init__(self, sent: list[int], rank: int) -> None:
        self.wait = lambda: sent.append(rank)


def test_its_step_leaves_the_gather_to_us(become: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    become(0)
    script = Script()
    sent: list[int] = []
    monkeypatch.setattr(script.optimizer, "_broadcast_params_from_rank", lambda rank: [Sent(sent, rank)])
    asked: list[Any] = []
    zero.stand_before_gather(script.optimizer, asked.append)
    first = next(script.model.parameters())
    before = first.detach().clone()
    script.step()
    assert asked == [script.optimizer]
    assert sent == []
    assert not torch.equal(first, before), "its own part is updated by then"
    zero.gather(script.optimizer)
    assert sent == [0, 1, 2, 3]


# ---------------------------------------------------------------- what is refused


def test_updates_in_backward_are_refused(become: Callable[[int], None]) -> None:
    become(0)
    model = nn.Linear(3, 3)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, overlap_with_ddp=True, lr=0.1)
    refused = layout.refusal(State(model, optimizer))
    assert refused is not None
    assert "updates in backward" in refused[0]


def test_a_part_of_the_ranks_is_refused(become: Callable[[int], None]) -> None:
    become(0)
    refused = layout.refusal(Script(process_group=dist.new_group([0, 1])).state)
    assert refused is not None
    assert "over a part of the ranks" in refused[0]


def test_two_of_them_are_refused(become: Callable[[int], None]) -> None:
    become(0)
    first, second = Script(), Script()
    state = State([first.model, second.model], [first.optimizer, second.optimizer])
    refused = layout.refusal(state)
    assert refused is not None
    assert refused[0] == "there are two ZeroRedundancyOptimizers"
