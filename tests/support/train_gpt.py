"""What tests of train gpt share."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.support.patience import longer

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_gpt.py"
SHORT = ["--params", "tiny", "--epochs", "2", "--epoch-steps", "8", "--batch", "2", "--warmup", "4"]


def run(*words: str) -> str:
    """Run a command as a user does, one thread a process; its output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=longer(500), env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
