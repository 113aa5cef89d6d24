"""The random state is exact: what is drawn after a restore is what would have been drawn."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from tests.support.random_state import left_as_found  # noqa: F401  a fixture
from torchrelay.worker.state import random_state


def test_numpy_random_is_not_imported_for_its_state() -> None:
    code = """
import sys
from torchrelay.worker.state import random_state
record = random_state.capture()
assert "numpy.random" not in sys.modules, "imported"
random_state.restore(record)
import numpy.random
assert len(random_state.capture()) > len(record)
random_state.restore(record)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_what_is_drawn_to_see_what_depends_on_it_can_be_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for known in (True, False):
        numpys = repr(np.random.get_state())
        if not known:
            monkeypatch.delitem(sys.modules, "numpy.random.mtrand")
        before = random_state.capture()
        random_state.draw()
        drawn = random_state.capture()
        random_state.restore(before)
        assert drawn != before == random_state.capture()
        assert repr(np.random.get_state()) == numpys
