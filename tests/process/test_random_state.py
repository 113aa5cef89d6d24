"""The random state is exact: what is drawn after a restore is what would have been drawn."""

from __future__ import annotations

import subprocess
import sys

from tests.support.random_state import left_as_found  # noqa: F401  a fixture


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
