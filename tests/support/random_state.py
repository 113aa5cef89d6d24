"""What tests of random state share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from torchrelay.worker.state import random_state


@pytest.fixture(autouse=True)
def left_as_found() -> Iterator[None]:
    before = random_state.capture()
    yield
    random_state.restore(before)
