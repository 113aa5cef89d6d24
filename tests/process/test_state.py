"""A state that was told, carried and taken is the same: in its digest, in its tensors' places, in what follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.carrying import Script, carry
from tests.support.state import left_as_found  # noqa: F401  a fixture
from torchrelay.worker.state.state import State


def goes_on_alike(one: Script, other: Script, first: State, second: State) -> None:
    for script in (one, other):
        torch.manual_seed(77)
        for _ in range(3):
            script.step()
    assert first.digest() == second.digest()


# ---------------------------------------------------------------- models and optimizers

OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"amsgrad": True}),
    "AdamW foreach": (torch.optim.AdamW, {"foreach": True}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "Adam with a tensor as rate": (torch.optim.Adam, {"lr": torch.tensor(0.01), "foreach": False}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "SGD without momentum": (torch.optim.SGD, {"lr": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "Rprop": (torch.optim.Rprop, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "LBFGS": (torch.optim.LBFGS, {"lr": 0.01, "max_iter": 2}),
}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_a_replacement_goes_on_as_its_source_would_have(name: str, used: bool) -> None:
    kind, options = OPTIMIZERS[name]
    source, target = Script(1, kind, **options), Script(2, kind, **options)
    for _ in range(4):
        source.step()
    if used:  # a replacement may have rehearsed: its state exists, with other values
        target.step()
    first, second = source.state(), target.state()
    assert first.digest() != second.digest()
    carry(first, second)
    assert first.digest() == second.digest()
    goes_on_alike(source, target, first, second)
