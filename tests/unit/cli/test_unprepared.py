"""Ctrl-C while the command still imports: the process ends by it, whatever it is importing."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from torchrelay.cli.launch.unprepared import ends_at_once

# SIGINT comes when a certain module is looked for.
STRUCK = """
import os, signal, sys

class Strike:
    @staticmethod
    def find_spec(name, path, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Strike)
from torchrelay.cli.main import main
main(sys.argv[2:])
"""


@pytest.mark.parametrize(
    "module", ["msgspec", "datetime", "torchrelay.cli.launch.run", "aiohttp", "torchrelay.launcher.local_run"]
)
def test_an_import_is_never_interrupted_by_an_exception(tmp_path: Path, module: str) -> None:
    (tmp_path / "train.py").write_text("")
    words = [sys.executable, "-c", STRUCK, module, "run", "train.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_afterwards_the_signal_means_what_it_meant_before() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        for handler, meanwhile in (
            (signal.default_int_handler, signal.SIG_DFL),
            (signal.SIG_IGN, signal.SIG_IGN),  # of a command that a shell has put into the background
        ):
            signal.signal(signal.SIGINT, handler)
            with ends_at_once():
                assert signal.getsignal(signal.SIGINT) == meanwhile
            assert signal.getsignal(signal.SIGINT) == handler
    finally:
        signal.signal(signal.SIGINT, before)
