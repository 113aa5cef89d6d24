"""A process that outlives SIGTERM: what of it ends all the same, and what a script sees of that."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

HEAD = """
import os, signal, subprocess, sys
from torchrelay.schedulers import lasting
TERM = signal.SIGTERM
lasting.outlive()
"""


def ended(body: str) -> tuple[int, str]:
    """How a process that outlives SIGTERM ends after these lines, and what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", HEAD + body], text=True, stdout=subprocess.PIPE, timeout=60, check=False
    )
    return done.returncode, done.stdout.strip()


def test_it_goes_on_and_looks_to_the_script_as_if_nothing_was_changed() -> None:
    assert ended("os.kill(os.getpid(), TERM); print(signal.getsignal(TERM) is signal.SIG_DFL)") == (0, "True")


def test_a_call_that_waits_is_not_cut_short() -> None:
    body = """
r, w = os.pipe()
if os.fork() == 0:
    os.kill(os.getppid(), TERM)
    os.write(w, b"x")
    os._exit(0)
print(os.read(r, 1))
"""
    assert ended(body) == (0, "b'x'")


def test_a_handler_of_the_script_is_called() -> None:
    assert ended("signal.signal(TERM, lambda *_: print('saved')); os.kill(os.getpid(), TERM)") == (0, "saved")


@pytest.mark.parametrize("kind", ["fork", "exec"])
def test_what_the_script_starts_ends_by_it(kind: str) -> None:
    body = {
        "fork": """
r, w = os.pipe()
pid = os.fork()
if pid == 0:
    os.write(w, b"it has forked")
    signal.pause()
os.read(r, 1)
os.kill(pid, TERM)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""",
        "exec": """
child = subprocess.Popen(["sleep", "60"])
child.terminate()
print(child.wait())
""",
    }[kind]
    assert ended(body) == (0, str(-signal.SIGTERM))


def test_it_ends_by_one_of_ours() -> None:
    assert ended("lasting.end_by(TERM); print('alive')") == (-signal.SIGTERM, "")


def test_one_of_ours_leaves_a_handler_of_the_script_alone_and_other_signals_end_nothing() -> None:
    body = """
lasting.end_by(signal.SIGUSR1)
for handler in (lambda *_: None, signal.SIG_IGN):
    signal.signal(TERM, handler)
    lasting.end_by(TERM)
print("alive")
"""
    assert ended(body) == (0, "alive")


def test_sigkill_ends_it() -> None:
    assert ended("os.kill(os.getpid(), signal.SIGKILL)") == (-signal.SIGKILL, "")


LOADING = """
from torch.utils.data._utils import signal_handling
from torchrelay.worker.bootstrap import lasting as of_worker
of_worker.install()
pid = os.fork()
if pid == 0:
    signal_handling._set_worker_signal_handlers()
    os.kill(os.getpid(), TERM)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_loader_workers_outlive_it_as_well() -> None:
    assert ended(LOADING) == (0, "7")


def test_loader_workers_of_a_rank_that_does_not_outlive_it_do_not_either() -> None:
    body = LOADING.replace("of_worker.install()", "lasting._lasting = False\nof_worker.install()")
    assert ended(body) == (0, str(-signal.SIGTERM))
