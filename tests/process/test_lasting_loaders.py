"""Loader workers of a rank that outlives a scheduler's SIGTERM: they do so, too, and end when their parent says so."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from torchrelay.schedulers import kinship

DEADLINE_S = 60.0
BEGIN = """
import ctypes, multiprocessing, os, signal, subprocess, sys, time
import torch
from torch.utils.data import DataLoader, Dataset
from torchrelay.schedulers import lasting as schedulers_lasting
from torchrelay.worker.bootstrap import lasting

schedulers_lasting.outlive()
lasting.install()

class Data(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return os.getpid()

def load(data=None, **further):
    return DataLoader(data or Data(), batch_size=4, num_workers=2, **further)
"""
PERSISTENT = """
loader = load(persistent_workers=True)
for batch in loader:
    pass
"""
KEPT_ITERATOR = """
kept = iter(load())
next(kept)
"""
needs_handler = pytest.mark.skipif(platform.machine() not in kinship.CODE, reason="no handler for this machine")


@contextmanager
def running(script: str, begin: str = BEGIN) -> Iterator[subprocess.Popen[str]]:
    """A process that runs it; it is killed in the end."""
    command = [sys.executable, "-c", begin + script]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and its loader's workers, where it has left any
        process.communicate()


def said(process: subprocess.Popen[str]) -> list[str]:
    """Its one line, after which it waits: what came with it would be lost to `ends_well`."""
    assert process.stdout is not None
    return process.stdout.readline().split()


def ends_well(process: subprocess.Popen[str]) -> str:
    """It goes on to its end, in time and without a complaint. Returns what else it has said."""
    out, complaint = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, complaint) == (0, "")
    return out.strip()


@pytest.mark.parametrize("script", [PERSISTENT, KEPT_ITERATOR], ids=["persistent workers", "a kept iterator"])
def test_a_process_whose_loader_is_still_there_ends(script: str) -> None:
    with running(script) as process:
        ends_well(process)


def test_so_does_a_child_of_the_script_that_has_a_loader() -> None:
    script = """
def child():
    global kept
    kept = iter(load())
    next(kept)

child = multiprocessing.get_context("fork").Process(target=child)
child.start()
child.join()
print(child.exitcode, flush=True)
"""
    with running(script) as process:
        assert ends_well(process) == "0"


@needs_handler
@pytest.mark.parametrize("by", ["os.kill(pid, signal.SIGTERM)", "loader._iterator._workers[0].terminate()"])
def test_a_worker_survives_a_stranger_s_sigterm_and_ends_by_its_parent_s(by: str) -> None:
    script = f"""
loader = load(persistent_workers=True)
next(iter(loader))
worker = loader._iterator._workers[0]
pid = worker.pid
print(pid, flush=True)
sys.stdin.readline()
print(len([pid for batch in loader for pid in batch]), worker.is_alive(), flush=True)
{by}
worker.join()
print(worker.exitcode, flush=True)
"""
    with running(script) as process:
        (pid,) = said(process)
        for _ in range(2):
            subprocess.run(["kill", "-TERM", pid], check=True)
        assert process.stdin is not None
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert ends_well(process).split() == ["64", "True", "0"]


def test_one_that_hangs_with_the_interpreter_held_ends() -> None:
    script = """
here, there = os.pipe()

class Hanging(Data):
    def __getitem__(self, index):
        os.write(there, b".")
        ctypes.PyDLL(None).sleep(1000)

kept = iter(load(Hanging()))
hanging = b""
while len(hanging) < 2:
    hanging += os.read(here, 1)
"""
    with running(script) as process:
        ends_well(process)


def test_what_a_dataset_starts_ends_by_sigterm() -> None:
    script = """
class Starting(Data):
    def __getitem__(self, index):
        started = subprocess.Popen(["sleep", "1000"])
        forked = os.fork()
        if not forked:
            time.sleep(1000)
            os._exit(1)
        os.kill(forked, signal.SIGTERM)
        started.terminate()
        return started.wait(), os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])

for batch in DataLoader(Starting(), batch_size=32, num_workers=1):
    print(*set(torch.cat(batch).tolist()), flush=True)
"""
    with running(script) as process:
        assert ends_well(process).split() == [str(-signal.SIGTERM)] * 2


def test_a_worker_s_own_handler_counts() -> None:
    script = """
def own(worker):
    def say(*_):
        os.write(1, b"own handler\\n")
        os._exit(0)

    signal.signal(signal.SIGTERM, say)

kept = iter(load(worker_init_fn=own))
for _ in range(2):  # one of each worker: both have their handler
    next(kept)
"""
    with running(script) as process:
        assert ends_well(process).splitlines() == ["own handler"] * 2


def test_a_child_that_is_told_to_end_as_soon_as_it_is_there_ends() -> None:
    script = """
for _ in range(50):
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
    child.start()
    child.terminate()
    child.join()
    print(child.exitcode, flush=True)
"""
    with running(script) as process:
        assert set(ends_well(process).split()) == {str(-signal.SIGTERM)}


def test_where_there_is_no_such_handler_it_says_so_and_ends_all_the_same() -> None:
    without = "from torchrelay.schedulers import kinship\nkinship.CODE.clear()\nlasting.install()\n"
    with running(PERSISTENT, BEGIN.replace("lasting.install()\n", without)) as process:
        _, complaint = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert "workers of a DataLoader end by a scheduler's SIGTERM" in complaint
