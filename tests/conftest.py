"""The order of tests, and marks that belong to whole folders."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.more_of_the_same import MORE
from tests.support.patience import FACTOR, longer

# A machine that is busy takes a second for what takes a millisecond: no time of one example says anything.
settings.register_profile("ours", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ours")

# It counts when torch is imported: here, and in the forkservers that tests start. For tiny tensors more threads only
# wait for one another, and on a busy machine for long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The files of bench/ import one another by their names.
sys.path.append(str(Path(__file__).parents[1] / "bench"))

# Nearly all that is made while tests are collected stays to the end: to search it again and again, then and in each
# test that collects garbage, would be a good part of the time.
gc.disable()

# A run of the tests starts thousands of processes, and each would compile all that it imports.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Who starts the tests in the background of a shell has SIGINT ignored, and so would all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What a folder is for is what its tests cost.
MARKS = {"unit": (), "process": ("slow",), "jobs": ("slow", "jobs"), "soak": ("slow", "jobs", "soak")}
FOLDER = Path(__file__).parent

# Files are handed out whole. One that takes minutes comes first, or the end of a run waits for it alone.
FIRST = (
    "test_worker", "test_simulation", "test_train_gpt", "test_layouts", "test_ddp", "test_faults", "test_cli_local_run",
    "test_netpath_backend", "test_snapshots_for_real", "test_lost_nodes", "test_exhaustive", "test_network_agent",
    "test_halts", "test_network_for_real", "test_halts_and_core", "test_operating_for_real", "test_identity",
)  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order and mark tests by their files. Raises `UsageError` for a part of a name that no test of its file has."""
    names: dict[str, list[str]] = {}
    items.sort(key=lambda item: FIRST.index(item.path.stem) if item.path.stem in FIRST else len(FIRST))
    for item in items:
        stem = item.path.stem
        names.setdefault(stem, []).append(item.name)
        if any(part in item.name for part in MORE.get(stem, ())):
            item.add_marker(pytest.mark.soak)
        for mark in MARKS[item.path.relative_to(FOLDER).parts[0]]:
            item.add_marker(mark)
        if FACTOR > 1 and (limit := item.get_closest_marker("timeout")) is not None:
            item.add_marker(pytest.mark.timeout(longer(limit.args[0])), append=False)
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return  # not all tests are here
    for stem, parts in MORE.items():
        for part in parts:
            if stem in names and not any(part in name for name in names[stem]):
                raise pytest.UsageError(f"tests/more_of_the_same.py: no test of {stem} has {part!r} in its name")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@contextmanager
def locked(how: int) -> Iterator[None]:
    """The kernel counts whom it kills for memory for the whole machine, so tests beside one another take turns."""
    with Path(tempfile.gettempdir(), f"torchrelay-tests-of-{os.getuid()}.lock").open("w") as file:
        fcntl.flock(file, how)
        yield


@pytest.fixture
def kernel_kills() -> Iterator[None]:
    """This test has the kernel kill somebody for memory."""
    with locked(fcntl.LOCK_EX):
        yield


@pytest.fixture
def no_kernel_kills() -> Iterator[None]:
    """In this test a killed process must not look as if the kernel had killed it for memory."""
    with locked(fcntl.LOCK_SH):
        yield


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """States are sent, though both ends are on one machine and one could read the other's (see test_neighbour)."""
    monkeypatch.setenv("TORCHRELAY_NEIGHBOURS", "0")


@pytest.fixture
def left_as_found() -> Iterator[None]:
    """Random generators are as before; and one thread, as for tiny tensors more of them only wait for one another."""
    import torch

    from torchrelay.worker.state import random_state

    before, threads = random_state.capture(), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    random_state.restore(before)


@pytest.fixture
def become() -> Iterator[Callable[[int], None]]:
    """Be this rank of four, alone, on the fake backend."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    def be(rank: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=HashStore(), rank=rank, world_size=4)

    yield be
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
