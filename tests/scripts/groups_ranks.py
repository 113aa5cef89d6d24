"""Ranks as puppets: real processes that do what a test tells them, one thing at a time.

Each has two strings: one moves its main thread (which may block in a collective), one its control thread.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

# torch prints a stack of its own for each broken connection. Read when the forkserver imports it.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
PRELOAD = ["tests.scripts.groups_actions", "tests.scripts.groups_training"]


def until(fact: Callable[[], object], within_s: float = 30.0) -> None:
    """Wait for a fact."""
    deadline = time.monotonic() + within_s
    while not fact():
        if time.monotonic() > deadline:
            raise TimeoutError(f"it did not come true within {within_s} s")
        time.sleep(0.002)


class Failed(Exception):
    """The puppet's action raised; `kind`, `text` and whether it counts as an error of communication."""

    def __init__(self, kind: str, text: str, collective: bool) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind, self.text, self.collective = kind, text, collective


class Actions:
    """What a puppet can do. State lives in `self`."""

    def __init__(self, rank: int, world_size: int) -> None:
        import torch

        torch.set_num_threads(1)
        self.rank, self.world_size = rank, world_size
        self.kept: dict[str, Any] = {}

    # -------------------------------------------------------- groups

    def host_store(self) -> str:
        from torchrelay.worker.process_groups import groups

        self.kept["store"], address = groups.host_store("127.0.0.1")
        return address

    def init(self, timeout_s: float = 60.0, backend: str = "gloo") -> None:
        from torchrelay.worker.process_groups import groups

        timeout = timedelta(seconds=timeout_s)
        groups.init_replacement(backend, rank=self.rank, world_size=self.world_size, timeout=timeout)

    def reconfigure(self, address: str, generation: int, timeout_s: float = 20.0) -> float:
        from torchrelay.worker.process_groups import groups

        begin = time.perf_counter()
        groups.reconfigure(groups.connect_store(address, timeout_s), generation=generation, timeout_s=timeout_s)
        return time.perf_counter() - begin

    def new_group(self, name: str, ranks: list[int]) -> None:
        import torch.distributed as dist

        group = dist.new_group(ranks, timeout=timedelta(seconds=60))
        if self.rank in ranks:
            self.kept[name] = group

    def all_reduce(self, value: float = 1.0, group: str | None = None, elements: int = 1) -> float:
        import torch
        import torch.distributed as dist

        tensor = torch.full((elements,), float(value))
        dist.all_reduce(tensor, group=self.kept[group] if group else None)
        return tensor[0].item()

    def backend_names(self) -> dict[str, str]:
        import torch.distributed as dist

        return {"default": dist.get_backend(), **{k: dist.get_backend(g) for k, g in self.kept.items() if k != "store"}}

    def held(self) -> tuple[int, int]:
        """(threads, descriptors) of this process."""
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    def method(self) -> str:
        from torchrelay.worker.process_groups import groups

        return groups.method()

    # -------------------------------------------------------- control thread

    def break_connections(self) -> tuple[float, int]:
        from torchrelay.worker.process_groups import groups

        return time.monotonic(), groups.break_connections()

    def collectives(self) -> int:
        from torchrelay.worker.process_groups import groups

        return groups.collectives()

    def begun(self) -> tuple[int, dict[int, int] | None]:
        """In the default group, and by key in the others."""
        from torchrelay.worker.process_groups import groups

        told = groups.begun_elsewhere()
        return groups.collectives(), None if told is None else dict(told)

    def call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Anything else: a function of the test's own, by reference."""
        return function(self, *arguments, **named)


def _obey(actions: Actions, string: Connection) -> None:
    from torchrelay.worker.process_groups import groups

    while True:
        try:
            name, arguments, named = string.recv()
        except EOFError:
            os._exit(0)
        try:
            answer: tuple[bool, Any, float] = (True, getattr(actions, name)(*arguments, **named), time.monotonic())
        except BaseException as error:  # noqa: BLE001  the top of this process: the test gets it
            described = (type(error).__name__, str(error), groups.is_collective_error(error))
            answer = (False, described, time.monotonic())
            del error
        string.send(answer)


def _puppet(rank: int, world_size: int, main: Connection, control: Connection, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    actions = Actions(rank, world_size)
    threading.Thread(target=_obey, args=(actions, control), daemon=True).start()
    _obey(actions, main)


class Puppet:
    """The test's end of one rank's strings."""

    def __init__(self, rank: int, world_size: int, environment: dict[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.main, its_main = context.Pipe()
        self.control, its_control = context.Pipe()
        arguments = (rank, world_size, its_main, its_control, environment)
        self.process = context.Process(target=_puppet, args=arguments, daemon=True)
        self.process.start()
        its_main.close()
        its_control.close()
        self.rank = rank
        self.ended_at = 0.0

    def tell(self, name: str, *arguments: Any, **named: Any) -> None:
        """Start an action of the main thread."""
        self.main.send((name, arguments, named))

    def result(self, within_s: float = 30.0) -> Any:
        """The result of what was told; raises `Failed`, or `TimeoutError` if the rank still does it."""
        if not self.main.poll(within_s):
            raise TimeoutError(f"rank {self.rank} is still at it after {within_s} s")
        fine: bool
        fine, value, self.ended_at = self.main.recv()
        if not fine:
            raise Failed(*value)
        return value

    def assert_busy(self, for_s: float = 0.2) -> None:
        """It is still at it, and stays so: that nothing happens can only be seen by looking for a while."""
        assert not self.main.poll(for_s), self.main.recv()

    def do(self, name: str, *arguments: Any, **named: Any) -> Any:
        self.tell(name, *arguments, **named)
        return self.result()

    def control_do(self, name: str, *arguments: Any, **named: Any) -> Any:
        self.control.send((name, arguments, named))
        if not self.control.poll(30):
            raise TimeoutError(f"the control thread of rank {self.rank} does not answer")
        fine, value, _ = self.control.recv()
        if not fine:
            raise Failed(*value)
        return value

    def kill(self) -> None:
        self.process.kill()  # does nothing if it has ended
        self.process.join(10)


class Troupe:
    """All ranks of a job."""

    def __init__(self, world_size: int, environment: dict[str, str]) -> None:
        self.world_size, self.environment = world_size, environment
        self.ranks = [Puppet(rank, world_size, environment) for rank in range(world_size)]
        self.generation = 0

    def tell(self, name: str, *arguments: Any, ranks: Iterable[int] | None = None, **named: Any) -> None:
        for puppet in self.ranks if ranks is None else [self.ranks[rank] for rank in ranks]:
            puppet.tell(name, *arguments, **named)

    def results(self, ranks: Iterable[int] | None = None, within_s: float = 60.0) -> list[Any]:
        """What each rank answered: a value, or the `Failed` it raised."""
        found: list[Any] = []
        for puppet in self.ranks if ranks is None else [self.ranks[rank] for rank in ranks]:
            try:
                found.append(puppet.result(within_s))
            except Failed as failed:
                found.append(failed)
        return found

    def do(self, name: str, *arguments: Any, ranks: Iterable[int] | None = None, **named: Any) -> list[Any]:
        self.tell(name, *arguments, ranks=ranks, **named)
        answers = self.results(ranks)
        for answer in answers:
            if isinstance(answer, Failed):
                raise answer
        return answers

    def start(self, timeout_s: float = 60.0) -> list[float]:
        self.do("init", timeout_s=timeout_s)
        return self.reconfigure()

    def reconfigure(self, timeout_s: float = 20.0, host: int = 0) -> list[float]:
        """A new generation; the store is hosted by rank `host`."""
        self.generation += 1
        address = self.ranks[host].do("host_store")
        return self.do("reconfigure", address, self.generation, timeout_s=timeout_s)

    def replace(self, rank: int) -> Puppet:
        """A fresh process in the place of a lost one."""
        self.ranks[rank] = Puppet(rank, self.world_size, self.environment)
        return self.ranks[rank]

    def close(self) -> None:
        for puppet in self.ranks:
            puppet.kill()
            puppet.main.close()
            puppet.control.close()


@contextmanager
def troupe(world_size: int, **environment: str) -> Iterator[Troupe]:
    ranks = Troupe(world_size, environment)
    try:
        yield ranks
    finally:
        ranks.close()
