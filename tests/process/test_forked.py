"""Children that a script forks: nothing of their parent's threads is waited for in them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

DROPPED = """
import gc, os, signal, sys
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo
from torchrelay.worker.bootstrap.main import leave_garbage_alone
if {alone}:
    leave_garbage_alone()
gc.disable()
circle = [ProcessGroupGloo(dist.HashStore(), 0, 1)]
circle.append(circle)
del circle
child = os.fork()
if child == 0:
    signal.alarm({patience_s})
    gc.collect()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

# Others' hooks run in the child before ours, and what they make may be what the collector has waited for.
EARLY = """
import gc, os, weakref
kept = []
os.register_at_fork(after_in_child=lambda: kept.extend([] for _ in range(5000)))
from torchrelay.worker.bootstrap.main import leave_garbage_alone
leave_garbage_alone()
class Thing: pass
gc.collect()
thing = Thing(); thing.itself = thing  # young: the next collection, if any, takes it
dropped = weakref.ref(thing)
del thing
child = os.fork()
if child == 0:
    os._exit(7 if dropped() is not None and gc.isenabled() else 1)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(code if gc.isenabled() else "the parent collects no more")
"""


def child_of(alone: bool, patience_s: int) -> int:
    """How a child ended that collects garbage, after its parent has dropped a process group; by SIGALRM in the end."""
    return run(DROPPED.format(alone=alone, patience_s=patience_s))


def run(program: str) -> int:
    """What it prints."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_a_forked_child_does_not_wait_for_threads_that_only_its_parent_has() -> None:
    assert child_of(alone=True, patience_s=20) == 7


def test_without_that_it_would_wait_for_ever_or_crash() -> None:
    # To join a thread that is not there is mostly to wait for it; seldom it is to read where nothing is.
    ends = (-signal.SIGALRM, -signal.SIGSEGV)
    assert child_of(alone=False, patience_s=5) in ends, "torch has mended it: leave_garbage_alone may go"


def test_nothing_is_collected_on_the_way_into_a_child_and_afterwards_as_ever() -> None:
    assert run(EARLY) == 7
