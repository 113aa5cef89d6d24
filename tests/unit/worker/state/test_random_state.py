"""The random state is exact: what is drawn after a restore is what would have been drawn."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.random_state import left_as_found  # noqa: F401  a fixture
from torchrelay.errors import RefusedError
from torchrelay.worker.state import random_state

GLOBAL: Any = np.random  # its stubs leave out the two functions on bit generators

DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(3).tolist(),
    "torch normal": lambda: torch.randn(1).item(),
    "torch permutation": lambda: torch.randperm(7).tolist(),
    "python": random.random,
    "python bits": lambda: random.getrandbits(3),
    "python gauss": lambda: random.gauss(0.0, 1.0),
    "python shuffle": lambda: random.sample(range(9), 4),
    "numpy": lambda: np.random.rand(),
    "numpy normal": lambda: np.random.standard_normal(),
    "numpy many": lambda: np.random.randint(0, 9, size=700).sum(),
    "numpy binomial": lambda: np.random.binomial(50, 0.4),
}


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def draw_all() -> list[Any]:
    return [draw() for draw in DRAWS.values()]


@pytest.mark.parametrize("before", [[], ["python gauss"], ["numpy normal"], ["python gauss", "numpy normal", "torch"]])
def test_what_follows_a_restore_is_what_would_have_followed(before: list[str]) -> None:
    seed_all(3)
    for name in before:
        DRAWS[name]()
    record = random_state.capture()
    expected = [draw_all(), draw_all()]
    seed_all(99)
    random_state.restore(record)
    assert random_state.equal(random_state.capture(), record)
    assert [draw_all(), draw_all()] == expected


@pytest.mark.parametrize("name", list(DRAWS))
def test_every_single_draw_shows(name: str) -> None:
    # Gauss numbers come in pairs: the second is kept by the generator and moves nothing else. Hence several draws.
    seed_all(4)
    seen = [random_state.capture()]
    for _ in range(4):
        DRAWS[name]()
        seen.append(random_state.capture())
    assert len(set(seen)) == 5


def test_taking_the_state_changes_nothing() -> None:
    first, second = random_state.capture(), random_state.capture()
    assert random_state.equal(first, second)


@given(st.lists(st.sampled_from([*DRAWS, "reseed", "restore"]), max_size=25))
@settings(max_examples=150, deadline=None)
def test_looking_at_memory_tells_what_asking_tells(acts: list[str]) -> None:
    seed_all(5)
    record = random_state.capture()
    for act in acts:
        if act == "reseed":
            np.random.seed(6)
            random.seed(6)
        elif act == "restore":
            random_state.restore(record)
        else:
            DRAWS[act]()
        _, words, gauss = random.getstate()
        assert random_state._python.state() == (np.array(words, np.uint32).tobytes(), gauss)
        watch = random_state._numpy_watch(sys.modules["numpy.random.mtrand"])
        assert watch.state() == random_state._asked(np.random.mtrand._rand)


def test_memory_is_looked_at_on_this_python() -> None:
    assert random_state._python_body_tells
    assert random_state._numpy_watch(sys.modules["numpy.random.mtrand"])._memory_tells


def test_without_the_shortcut_the_record_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    seed_all(8)
    draw_all()
    quick = random_state.capture()
    monkeypatch.setattr(random_state, "_python_body_tells", False)
    monkeypatch.setattr(random_state._numpy_watch(sys.modules["numpy.random.mtrand"]), "_memory_tells", False)
    assert random_state.capture() == quick
    draw_all()
    assert random_state.capture() != quick


@pytest.mark.parametrize("cut", [0, 3, 40, 5000, 9000, -1])
def test_a_record_that_is_not_whole_is_refused_and_changes_nothing(cut: int) -> None:
    record = random_state.capture()
    draw_all()
    now = random_state.capture()
    with pytest.raises(ValueError, match="random state"):
        random_state.restore(record[:cut])
    with pytest.raises(ValueError, match="random state"):
        random_state.restore(record + b"x")
    assert random_state.capture() == now


def test_another_global_generator_of_numpy_is_refused_with_the_remedy() -> None:
    old = GLOBAL.get_bit_generator()
    GLOBAL.set_bit_generator(np.random.PCG64(1))
    try:
        with pytest.raises(RefusedError, match="PCG64"):
            random_state.capture()
    finally:
        GLOBAL.set_bit_generator(old)
    random_state.capture()


def test_a_fresh_mt19937_in_numpy_is_followed() -> None:
    old = GLOBAL.get_bit_generator()
    random_state.capture()
    GLOBAL.set_bit_generator(np.random.MT19937(11))
    try:
        record = random_state.capture()
        expected = np.random.rand(3).tolist()
        random_state.restore(record)
        assert np.random.rand(3).tolist() == expected
    finally:
        GLOBAL.set_bit_generator(old)
