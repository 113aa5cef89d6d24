"""What tests of state share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def left_as_found() -> Iterator[None]:
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(1)  # for tiny tensors more of them only wait for one another
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(before)
