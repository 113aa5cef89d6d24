"""Identity: a worker runs its script before it knows which rank it is, up to the moment when the script asks.

The script asks by reading RANK or one of its kin from `os.environ`, by looking at the whole environment, or by
`init_process_group`. There it waits for its assignment. From then on `os.environ` is as plain as ever.

Whoever asks writes the environment, never the control thread that brings the rank: setting a variable may move the C
environment while another thread reads it (torch calls getenv in many places), and that ends the process.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torchrelay.errors import RefusedError
from torchrelay.protocol.messages.ids import Rank
from torchrelay.protocol.messages.orders import Assign
from torchrelay.wire.files import output

# The variables that tell ranks apart, and what is known with them only.
NAMES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "TORCHELASTIC_RESTART_COUNT")


LOOK_S = 1.0  # between two looks at whether waiting makes sense


def _nothing(*_: object) -> None:
    pass


class Identity:
    """Which rank this worker is, once it is known."""

    def __init__(self, logs: Path | None = None) -> None:
        """`logs`: the folder of the ranks' log files; None: output stays where it goes."""
        self._logs = logs
        self._known = threading.Event()
        self._becoming = threading.Lock()
        self._told = False  # the environment tells our rank
        self._telling = threading.RLock()  # a signal handler may ask while we write
        self.assigned: Assign | None = None
        self.assigned_cpu_s = 0.0  # processor time of this process by then
        self.asked: Callable[[], None] = _nothing  # called once: the script asks for its rank for the first time
        self.told: Callable[[Assign], object] = _nothing  # called once: the script is about to hear its rank
        self.wait_on: Callable[[], None] = _nothing  # called now and then while the rank is waited for; raises to end

    @property
    def known(self) -> bool:
        return self._known.is_set()

    def wait(self) -> Assign:
        """Wait, as long as `wait_on` allows: a spare may be one for days. Then the environment tells the rank, too."""
        asked, self.asked = self.asked, _nothing
        asked()
        while not self._known.wait(LOOK_S):
            self.wait_on()
        assert self.assigned is not None, "what is known is there"
        self._tell(self.assigned)
        return self.assigned

    @property
    def rank(self) -> Rank:
        """Our rank; waits until it is known."""
        known = self.assigned if self.known else self.wait()
        assert known is not None, "what is known is there"
        return known.rank

    def assign(self, order: Assign) -> None:
        """Become this rank: its log file first, then whoever waits goes on. Twice is as good as once."""
        with self._becoming:
            if self.assigned is not None:
                if self.assigned.rank != order.rank:
                    raise ValueError(f"this worker is rank {self.assigned.rank} and cannot become rank {order.rank}")
                return
            self.assigned, self.assigned_cpu_s = order, time.process_time()
            if not order.examples:  # the rank's log is still its holder's, which trains on
                self.take_over_output()
            self._known.set()

    def _tell(self, order: Assign) -> None:
        """Write the environment, once, in the thread that asks."""
        if self._told or threading.current_thread().name == CONTROL_THREAD:
            return
        with self._telling:
            if not self._told:
                values = environment_of(order)
                values |= arrange(os.environ, order.local_rank, int(values["LOCAL_RANK"]))
                tell_environment(values)
                self._told = True
                self.told(order)

    def take_over_output(self) -> None:
        """What is printed from now on belongs into the rank's log."""
        logs, self._logs = self._logs, None
        if logs is not None:
            assert self.assigned is not None, "who writes for a rank has been assigned to it"
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            if not output.announce(self.assigned.rank):
                point_output_to(logs / f"rank-{self.assigned.rank}.log")

    def let_environment_wait(self) -> None:
        """From now on, whoever asks `os.environ` for the rank waits for it, unless it has come already."""
        with self._becoming:
            if self.assigned is None:
                make_environment_wait(self.wait)
                return
        self._tell(self.assigned)


def environment_of(order: Assign) -> dict[str, str]:
    """torchrun's variables that differ between ranks, or are known with the rank only."""
    group, local_rank = divmod(order.rank, order.local_world_size)
    return {
        "RANK": str(order.rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(group),
        "ROLE_RANK": str(order.rank),
        "WORLD_SIZE": str(order.world_size),
        "ROLE_WORLD_SIZE": str(order.world_size),
        "LOCAL_WORLD_SIZE": str(order.local_world_size),
        "GROUP_WORLD_SIZE": str(-(-order.world_size // order.local_world_size)),
        "TORCHELASTIC_RESTART_COUNT": str(order.restarts),
    }


def point_output_to(path: Path) -> None:
    """From here on, what is printed goes to the end of this file, by whatever part of the process."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        for standard in (1, 2):
            os.dup2(descriptor, standard)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------- os.environ


_wait: Callable[[], Any] | None = None  # set while os.environ waits


class _WaitingEnviron(os._Environ):  # type: ignore[type-arg]  # generic in the stubs only
    """os.environ for as long as the rank is not known: looking at what depends on it waits.

    While it waits it becomes plain again, so after the wait `super()` would refuse it: the methods are called by name.
    """

    def __getitem__(self, key: Any) -> Any:
        if _plain(key) in NAMES:
            _wait_for_rank()
        return os._Environ.__getitem__(self, key)

    def __iter__(self) -> Iterator[Any]:
        _wait_for_rank()
        return os._Environ.__iter__(self)

    def __len__(self) -> int:
        _wait_for_rank()
        return os._Environ.__len__(self)

    def __repr__(self) -> str:
        _wait_for_rank()
        return os._Environ.__repr__(self)

    def copy(self) -> dict[Any, Any]:
        _wait_for_rank()
        return os._Environ.copy(self)


def _plain(key: Any) -> Any:
    return os.fsdecode(key) if isinstance(key, bytes) else key


def _wait_for_rank() -> None:
    if _wait is not None and threading.current_thread().name != CONTROL_THREAD:
        _wait()


CONTROL_THREAD = "torchrelay agent"  # it brings the rank, so it must not wait for it


def make_environment_wait(wait: Callable[[], Any]) -> None:
    """From now on, whoever asks `os.environ` for the rank waits; until `tell_environment`."""
    global _wait
    _wait = wait
    for name in NAMES:
        # A stale value (of the operator's shell, or of the agent) must not be seen by who reads the C environment.
        os.environ.pop(name, None)
    environ: Any
    for environ in (os.environ, os.environb):
        environ.__class__ = _WaitingEnviron  # the same layout, other methods


def tell_environment(values: dict[str, str]) -> None:
    """Put the values there and let `os.environ` be plain again."""
    global _wait
    for name, value in values.items():
        os.environ[name] = value
    _wait = None
    _make_plain()


def _make_plain() -> None:
    environ: Any
    for environ in (os.environ, os.environb):
        if isinstance(environ, _WaitingEnviron):
            setattr(environ, "__class__", os._Environ)  # noqa: B010  mypy takes the class for what it was


# A child has no control thread that could bring it a rank: it sees the environment as it is.
os.register_at_fork(after_in_child=_make_plain)


# ---------------------------------------------------------------- its device

# A rank keeps its LOCAL_RANK wherever it goes, and finds the device of its slot under it.
#
# Scripts say `cuda:LOCAL_RANK`, and expect it below LOCAL_WORLD_SIZE. So in the list of visible devices the one of the
# slot changes places with the one at LOCAL_RANK, before CUDA is initialised. All devices stay visible.

VISIBLE = "CUDA_VISIBLE_DEVICES"


def arrange(env: Mapping[str, str], slot: int, local_rank: int) -> dict[str, str]:
    """What is to be set so that index `local_rank` is the device of `slot`; nothing if it is, or has no device.

    Raises `RefusedError` if the script has used CUDA before it asked for its rank.
    """
    if slot == local_rank:
        return {}
    devices = [name.strip() for name in env[VISIBLE].split(",")] if VISIBLE in env else count()
    if max(slot, local_rank) >= len(devices):
        return {}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise RefusedError(
            f"local rank {local_rank} has come to slot {slot}, and its script had used CUDA before it asked for its "
            "rank: the slot's device cannot be arranged for it any more",
            "read RANK or call init_process_group before CUDA is used",
        )
    devices[slot], devices[local_rank] = devices[local_rank], devices[slot]
    return {VISIBLE: ",".join(devices)}


def count() -> list[str]:
    """The devices of this machine by their numbers. Does not initialise CUDA."""
    torch: Any = sys.modules.get("torch")
    return [] if torch is None else [str(index) for index in range(torch.cuda.device_count())]
