"""For tests of the state: a script with a model of everything, and a way to carry its state without a wire."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchrelay.worker.state.state import State
from torchrelay.worker.tensors import memory


def carry(source: State, target: State) -> None:
    """What a transfer does, without a wire."""
    data, tensors = source.manifest()
    places = target.receive(data)
    for tensor, place in zip(tensors, places, strict=True):
        sent = b"".join(memory.outgoing(tensor))
        at = 0
        for view, filled in memory.incoming(place):
            view[:] = sent[at : at + len(view)]
            at += len(view)
            if filled is not None:
                filled()
        assert at == len(sent)
    target.commit_received()


class Script:
    """What a user's script has: a model with everything in it, an optimizer, and a step."""

    def __init__(
        self, seed: int, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **options: Any
    ) -> None:
        torch.manual_seed(seed)
        self.model: Any = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 4))
        self.model.register_buffer("mask", torch.ones(4), persistent=False)
        self.model.append(nn.Linear(4, 4, bias=False))
        self.model[5].weight = nn.Parameter(torch.eye(4))
        self.optimizer = optimizer(self.model.parameters(), **options)

    def step(self) -> None:
        def closure() -> float:
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(6, 4)).square().sum()
            loss.backward()
            return float(loss.detach())

        self.optimizer.step(closure)

    def state(self, **extra: Any) -> State:
        return State(self.model, self.optimizer, extra)
