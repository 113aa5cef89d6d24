"""DTensor's tracker of random numbers is there on all ranks or on none, and nobody makes it alone with a broadcast.

It exists on CUDA only: what stands for the device here are fakes. `features.py tracker` goes through faults with it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor._random as tensors

from torchrelay.worker.state import random_state

OURS = 3  # our device, of eight


class Device:
    """What torch asks of torch.cuda, with a random state of 16 bytes."""

    def __init__(self) -> None:
        self.state = torch.arange(16, dtype=torch.uint8)

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 8

    def get_rng_state(self) -> torch.Tensor:
        return self.state.clone()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.state = state.clone()


@pytest.fixture
def broadcasts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A process with a device, and from which rank it was broadcast to it."""
    device, heard = Device(), list[int]()

    def broadcast(state: torch.Tensor, source: int) -> None:
        heard.append(source)
        state.fill_(7)

    monkeypatch.setattr(tensors, "_get_device_handle", lambda _: device)
    monkeypatch.setattr(tensors.OffsetBasedRNGTracker, "_get_device_state", lambda _: device.get_rng_state())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: OURS)
    monkeypatch.setattr(dist, "broadcast", broadcast)
    monkeypatch.setattr(tensors, "_rng_tracker", None)
    return heard


def make_as_torch_does() -> None:
    mesh: Any = SimpleNamespace(device_type="cuda", get_rank=lambda: 5)
    tensors._rng_tracker = tensors.OffsetBasedRNGTracker(mesh)


def test_torch_makes_it_with_a_broadcast_over_all_ranks(broadcasts: list[int]) -> None:
    make_as_torch_does()
    assert broadcasts == [0]


def test_a_replacement_has_it_if_the_lost_worker_had_it_and_asks_nobody(broadcasts: list[int]) -> None:
    make_as_torch_does()
    record = random_state.capture()
    tensors._rng_tracker = None
    broadcasts.clear()
    random_state.restore(record)
    assert isinstance(tensors._rng_tracker, tensors.OffsetBasedRNGTracker)
    assert tensors._rng_tracker._device == torch.device("cuda", OURS)
    assert broadcasts == []
    assert random_state.capture() == record


def test_one_that_a_redone_step_or_a_rehearsal_has_made_is_gone(broadcasts: list[int]) -> None:
    entry = random_state.capture()
    make_as_torch_does()
    assert random_state.capture() != entry
    random_state.restore(entry)
    assert not random_state.tracker_is_there()
    assert broadcasts == [0]


def test_one_that_is_there_stays_the_same_object(broadcasts: list[int]) -> None:
    make_as_torch_does()
    there = tensors._rng_tracker
    random_state.restore(random_state.capture())
    assert tensors._rng_tracker is there
    assert broadcasts == [0]
