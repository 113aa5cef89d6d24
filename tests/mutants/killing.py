"""Killing mutants: each is loaded in place of the real module in a process of its own, and meets all tests in turn.

Those come first that have killed others of its module, then the fastest. A test that fails kills, and so does one that
does not end: processor time is limited, so that a busy machine kills nobody.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, ModuleType
from typing import Any

import pytest

from tests.mutants.making import Mutant, path_of

CPU_S = 120
MEMORY = 3 << 30


class Loader(importlib.abc.Loader):
    """Runs changed code under the name of the real module."""

    def __init__(self, code: CodeType) -> None:
        self._code = code

    def exec_module(self, module: ModuleType) -> None:
        exec(self._code, module.__dict__)


class Finder(importlib.abc.MetaPathFinder):
    """Gives the mutant to whoever imports the module."""

    def __init__(self, name: str, tree: ast.Module) -> None:
        self._name = name
        self._code = compile(tree, f"<mutant of {name}>", "exec")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if fullname != self._name:
            return None
        return importlib.util.spec_from_loader(fullname, Loader(self._code))


# ---------------------------------------------------------------- killers


def tell_transcripts() -> None:
    from tests.support.transcripts import FILES, retell

    for path in FILES:
        text = path.read_text()
        assert retell(text) == text, path.stem


def explore_a_start() -> None:
    from tests.support.exhaustive import explore, from_the_start

    explore(from_the_start(), last_generation=1, limit=3_000)


def explore_a_recovery() -> None:
    from tests.support import small_world
    from tests.support.exhaustive import explore

    explore(small_world.beginning(), last_generation=2, limit=3_000)


def explore_a_move() -> None:
    from tests.process import test_exhaustive

    test_exhaustive.explore_the_way_to_the_boundary()
    test_exhaustive.explore_a_cutover()


TESTS = Path(__file__).parent.parent / "unit" / "protocol"
ELSEWHERE = ("test_transcripts",)  # a killer of its own
LARGE = ("test_many_at_once", "test_standing")  # they take seconds


# What tests are given, by what their module makes it with.
FIXTURES = {"sharded": "Sharded", "story": "three_ranks", "cluster": "with_strays", "trains": "with_a_place"}


def run_tests_of(*names: str) -> None:
    """All tests of these modules; each case of those with parameters."""
    for name in names:
        run_tests_in(importlib.import_module(f"tests.unit.protocol.{name}"))


def run_tests_in(module: ModuleType) -> None:
    for name, test in list(vars(module).items()):
        if not name.startswith("test_"):
            continue
        taken = signature(test).parameters
        marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
        for combined in itertools.product(*map(cases, marks)):
            given = {key: value for one in combined for key, value in one.items()}
            made = {name: getattr(module, maker)() for name, maker in FIXTURES.items() if name in taken}
            with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
                own = {"monkeypatch": patch, "tmp_path": Path(folder)}
                test(**made, **given, **{name: own[name] for name in taken if name in own})


def cases(mark: pytest.Mark) -> Iterator[dict[str, Any]]:
    """The parameters of each case, by name."""
    names = mark.args[0]
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",")]
        single = len(names) == 1
    else:
        single = False
    for case in mark.args[1]:
        yield dict(zip(names, (case,) if single else case, strict=True))


def simulate_some() -> None:
    simulate(0, 150)


def simulate_more() -> None:
    simulate(150, 1_000)


def simulate(first: int, last: int) -> None:
    from torchrelay.simulation.world import run_seed

    for seed in range(first, last):
        result = run_seed(seed)
        assert not result.violation, f"seed {seed}: {result.violation}"


def vary_sequences() -> None:
    from hypothesis import HealthCheck, Phase, given, settings

    from tests.support.properties import MOVES, check

    profile = settings(
        max_examples=150,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    profile(given(MOVES)(check))()


def unit_tests() -> dict[str, Callable[[], None]]:
    """All other tests of the core, by their modules."""
    names = sorted({path.stem for path in TESTS.glob("test_*.py")} - {*ELSEWHERE})
    names.sort(key=lambda name: name in LARGE)
    return {name: partial(run_tests_of, name) for name in names}


KILLERS: dict[str, Callable[[], None]] = {
    "transcripts": tell_transcripts,
    **unit_tests(),
    "exhaustive: a move": explore_a_move,
    "exhaustive: a start": explore_a_start,
    "exhaustive: a recovery": explore_a_recovery,
    "simulation": simulate_some,
    "properties": vary_sequences,
    "more simulation": simulate_more,
}


def in_order(kills: Mapping[str, int]) -> list[str]:
    """All killers: those first that have killed other mutants of the same module, the most successful one first."""
    return sorted(KILLERS, key=lambda name: -kills.get(name, 0))


def killer_of(mutant: Mutant | None, order: Sequence[str]) -> str:
    """The first test that notices the mutant (None: the core as it is); empty if none does. Ends this process's use."""
    if mutant is not None:
        sys.meta_path.insert(
            0, Finder(f"torchrelay.protocol.{path_of(mutant.module).parent.name}.{mutant.module}", mutant.tree())
        )
    for name in order:
        try:
            KILLERS[name]()
        except Exception:  # noqa: BLE001  whatever a broken core does, it is noticed
            return name
    return ""


def in_a_child(mutant: Mutant | None, order: Sequence[str], pipe: int) -> None:
    """Run the tests in this forked process, and write who killed. Never returns."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        os.write(pipe, f"+{killer_of(mutant, order)}".encode())
    finally:
        os._exit(0)


def fork_for(mutant: Mutant | None, kills: Mapping[str, int]) -> tuple[int, int]:
    """Start the tests of a mutant; returns the child's process id and the pipe on which it tells.

    `kills`: how many mutants of the same module each killer has killed.
    """
    assert not any(name.startswith("torchrelay.protocol") for name in sys.modules), (
        "the core is loaded in children only"
    )
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        in_a_child(mutant, in_order(kills), writing)
    os.close(writing)
    return child, reading


def told(reading: int) -> str:
    """What a child that has ended wrote: its killer, or how it ended itself."""
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read().decode()
    return text.removeprefix("+") if text else "it does not come to an end"
