"""What the script was told in one test is not known in the next."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from torchrelay.worker.parallel import of_state
from torchrelay.worker.tensors import absent


@pytest.fixture(autouse=True)
def none_refused() -> Iterator[None]:
    absent._refused.clear()
    of_state._free.clear()
    yield
    absent._refused.clear()
