"""Buffers are known by their names: others may stand there after a forward pass, and go back when it is made again."""

from __future__ import annotations

import torch
from torch import nn

from torchrelay.worker.state.buffers import Buffers


class Centered(nn.Module):
    center: torch.Tensor
    passes: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(2))
        self.register_buffer("passes", torch.zeros(()))
        self.inner = nn.BatchNorm1d(2)


def test_one_that_is_bound_anew_is_seen_once_and_can_be_bound_again() -> None:
    module = Centered()
    buffers = Buffers([("model", module)])
    assert buffers.refresh() == set()
    before, center = buffers.bound(), module.center
    module.center = module.center + 1
    assert buffers.refresh() == {"model.center"}
    assert buffers.now["model.center"] is module.center
    assert buffers.refresh() == set()
    buffers.bind(before)
    assert module.center is center
    assert buffers.now["model.center"] is center


def test_one_that_the_script_takes_away_stays_away() -> None:
    module = Centered()
    buffers = Buffers([("model", module)])
    del module.passes
    buffers.refresh()
    buffers.bind(buffers.bound())
    assert "passes" not in module._buffers


def test_one_that_a_call_takes_away_comes_back() -> None:
    module = Centered()
    buffers = Buffers([("model", module)])
    before, passes = buffers.bound(), module.passes
    del module.passes
    buffers.refresh()
    buffers.bind(before)
    assert module.passes is passes
