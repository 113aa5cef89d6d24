"""The device of a rank: that of its parameters, in every thread."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchrelay.worker.hardware import device


def on(kind: str, index: int = 0) -> Any:
    return SimpleNamespace(device=torch.device(kind, index))


@pytest.fixture(autouse=True)
def _chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_settled", None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def test_it_is_where_the_parameters_are() -> None:
    device.settle([on("cpu"), on("cuda", 5), on("cuda", 6)])
    assert device.own() == torch.device("cuda", 5), "whatever device a thread has chosen"


def test_until_it_is_known_it_is_the_one_that_is_chosen() -> None:
    device.settle([on("cpu")])
    assert device.own() == torch.device("cuda", 0)


def test_it_waits_for_its_own_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    device.settle([on("cuda", 5)])
    device.wait()
    assert waited == [], "nothing was used yet"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    device.wait()
    assert waited == [torch.device("cuda", 5)]
