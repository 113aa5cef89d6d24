"""What functions under way keep in their variables is told at an item of a loop, and put into the same ones later."""

from __future__ import annotations

import enum
import itertools
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from torchrelay.errors import UnprovedError
from torchrelay.worker.hidden_state import variables
from torchrelay.worker.hidden_state.around import variables_around
from torchrelay.worker.hidden_state.hidden import Hidden
from torchrelay.worker.hidden_state.moving import Moving

declared = 0


class Items:
    """Yields numbers; tells what is around it, or puts it there, at one of them."""

    def __init__(self, first: int, last: int, told: bytes = b"") -> None:
        self.first, self.last, self.left = first, last, told

    def __iter__(self) -> Iterator[int]:
        for at in range(self.first, self.last):
            if self.left and at == self.first:
                variables.put(sys._getframe(1), self.left)
            self.told = variables.told(sys._getframe(1))
            yield at


def train(items: Items) -> dict[str, Any]:
    global declared
    count, best, untouched = 0, 1e9, 5
    recent: deque[float] = deque(maxlen=3)
    total, seen, kinds = torch.zeros(()), set[int](), {"a": 0}
    largest = np.float64(0)
    alias = recent
    for item in items:
        count += 1
        declared += 2
        best = min(best, 100.0 - item)
        recent.append(float(item))
        total = total + item
        seen.add(item % 3)
        kinds["a"] += item
        largest = np.maximum(largest, np.float64(item))
    assert alias is recent
    return {
        "count": count,
        "best": best,
        "recent": list(recent),
        "total": float(total),
        "seen": seen,
        "kinds": kinds,
        "largest": float(largest),
        "untouched": untouched,
        "declared": declared,
    }


class Augment:
    """Draws for an item, as mixup does."""

    def __init__(self) -> None:
        self.numbers = np.random.default_rng(2)


def augmented(items: Items) -> list[float]:
    """Draws at each item from generators that only its own variables hold."""
    numbers, words, augment = np.random.default_rng(1), random.Random(1), Augment()
    tensors = torch.Generator().manual_seed(1)
    drawn = []
    for _ in items:
        drawn = [numbers.random(), words.random(), augment.numbers.random(), float(torch.rand((), generator=tensors))]
    return drawn


def test_generators_in_variables_go_on_where_they_were_at_the_item() -> None:
    """What was drawn since the last gate is in no call's record: only the item's own tells of it."""
    whole = augmented(Items(0, 7))
    begun = Items(0, 5)
    augmented(begun)
    assert augmented(Items(4, 7, begun.told)) == whole
    assert augmented(Items(4, 7)) != whole


class Stream:
    """Wraps an iterator, as loaders without an end do."""

    def __init__(self) -> None:
        self.inner = (at * at for at in range(100))

    def __next__(self) -> int:
        return next(self.inner)


def going_on(items: Items, make: Callable[[], Any]) -> int:
    numbers, number = make(), 0
    for _ in items:
        number = next(numbers)
    return number


@pytest.mark.parametrize(
    "make", [lambda: (at for at in range(99)), lambda: iter(range(99)), lambda: itertools.cycle([1, 2]), Stream]
)
def test_a_function_that_goes_on_with_an_iterator_is_not_entered_in_the_middle(make: Callable[[], Any]) -> None:
    first = Items(0, 5)
    assert going_on(first, make)
    with pytest.raises(UnprovedError, match=r"numbers of going_on\(\) changes .* cannot be carried"):
        going_on(Items(4, 6, first.told), make)


def test_an_iterator_that_nobody_goes_on_with_is_no_matter() -> None:
    numbers, number = iter(range(7)), 0
    items = Items(0, 5)
    for item in items:
        number += item
    assert len(list(numbers)) == 7
    assert b"number" in items.told


@pytest.mark.parametrize("make", [lambda: iter([1]), lambda: itertools.cycle([1, 2]), lambda: (at for at in [1])])
def test_nor_is_one_beside_the_loop(make: Callable[[], Any]) -> None:
    numbers, total = make(), 0
    items = Items(0, 5)
    for item in items:
        total += item if item < 99 else next(numbers)
    assert b"numbers" not in items.told
    assert b"total" in items.told


def test_an_iterator_that_has_come_to_its_end_is_no_matter() -> None:
    numbers, number = iter([1]), 0
    items = Items(0, 5)
    for _ in items:
        number += next(numbers, 0)
    assert b"number" in items.told


def test_a_function_that_enters_in_the_middle_ends_with_the_same_variables() -> None:
    global declared
    declared = 0
    whole = train(Items(0, 10))
    declared = 0
    first = Items(0, 7)
    train(first)  # what it told last is of item 6
    declared = 0
    assert train(Items(6, 10, first.told)) == whole


def test_variables_of_a_function_around_and_of_one_inside_are_told_apart() -> None:
    def outer(items: Items) -> list[int]:
        epochs = 0
        for _ in range(1):
            epochs += 10
            inner = train(items)
        return [epochs, inner["count"]]

    first = Items(0, 4)
    assert outer(first) == [10, 4]
    assert outer(Items(3, 6, first.told)) == [10, 6]


def test_nothing_is_put_into_another_function() -> None:
    first = Items(0, 7)
    train(first)

    def other(items: Items) -> int:
        count = 0
        for _ in items:
            count += 1
        return count

    assert other(Items(0, 3, first.told)) == 3


def test_a_container_that_stays_as_it_is_is_the_process_own() -> None:
    def read(items: Items, path: str) -> list[str]:
        config, seen = {"folder": path}, list[str]()
        for _ in items:
            seen.append(config["folder"])
        return seen

    first = Items(0, 5)
    read(first, "mine")
    assert read(Items(4, 6, first.told), "yours") == ["mine"] * 4 + ["yours"] * 2


def test_what_is_large_is_left_alone() -> None:
    def hoard(items: Items) -> int:
        text, numbers, whole = "", list[int](), 0
        for item in items:
            text += "x" * 2000
            numbers += range(item * 100)
            whole = whole * 10**20 + 1
        return len(text)

    items = Items(0, 9)
    hoard(items)
    assert len(items.told) < 200


def test_the_variables_of_an_object_of_the_script_follow_when_another_one_takes_its_place() -> None:
    class Holder:
        def __init__(self) -> None:
            self.meter = Meter()

    class Meter:
        def __init__(self) -> None:
            self.count = 0

    holder = Holder()
    moving = Moving(lambda: [("holder", holder)])
    for _ in range(3):
        holder.meter.count += 1
        moving.look()
    holder.meter = Meter()  # a new epoch
    holder.meter.count = 1
    told = moving.record()
    later = Holder()
    Moving(lambda: [("holder", later)]).put(told)
    assert later.meter.count == 1


# ---------------------------------------------------------------- what steps reach


class Scaled:
    factor = 1.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(2, 2), nn.Dropout(0.5)
        self.inner.register_forward_hook(counting(1.5))
        self.drop.register_forward_hook(counting(0.5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        Scaled.factor *= 1.5
        out: torch.Tensor = self.drop(self.inner(inputs))
        return out


def counting(by: float) -> Any:
    calls = 0.0

    def hook(module: nn.Module, inputs: Any, out: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        del module, inputs
        calls += by
        return out * calls

    return hook


def life(told: bytes = b"", steps: int = 4) -> tuple[bytes, list[Any]]:
    Scaled.factor = 1.0
    net, numbers = Net(), itertools.count(1)

    def step() -> int:
        net(torch.ones(1, 2))
        return next(numbers)

    hidden = Hidden([("model", net)])
    hidden.add(step)
    if told:
        hidden.load(told)
    for _ in range(steps):
        hidden.mark()
        hidden.look_entry()
        step()
        net.drop.p -= 0.01
        hidden.look_gate()
        hidden.look_return()
    hooks = [module._forward_hooks for module in (net.inner, net.drop)]
    closed = [one.read() for each in hooks for one in variables_around(each.values())]
    return hidden.record(), [Scaled.factor, net.drop.p, step(), *closed]


def test_hooks_classes_settings_and_counters_go_on_in_a_replacement() -> None:
    _, whole = life(steps=7)
    told, _ = life(steps=4)
    assert life(told, steps=3)[1] == whole


def test_a_flag_is_the_processs_own() -> None:
    ready = False
    number = 0
    items = Items(0, 3)
    for item in items:
        number += item
        if not ready:
            ready = True
    assert ready
    assert b"number" in items.told
    assert b"ready" not in items.told


COUNTS = """
def train(items):
    number = 0
    for item in items:
        number += item
"""


def test_a_function_of_the_script_is_told_of_though_a_library_has_one_that_is_equal() -> None:
    """Python takes codes to be equal whose names, first lines and instructions are, whatever their files."""
    library: dict[str, Any] = {}
    script: dict[str, Any] = {}
    exec(compile(COUNTS, str(Path(torch.__file__).parent / "train.py"), "exec"), library)
    exec(compile(COUNTS, str(Path(__file__).parent / "train.py"), "exec"), script)
    assert library["train"].__code__ == script["train"].__code__
    for each, is_told in ((library, False), (script, True)):
        items = Items(0, 3)
        each["train"](items)
        assert (b"number" in items.told) is is_told


def test_functions_that_are_made_anew_in_each_step_do_not_fill_the_memory() -> None:
    for at in range(variables._MOST_CODES + 2):
        made: dict[str, Any] = {"outside": variables.outside}
        exec(compile("def step():\n    outside()", f"/script/{at}.py", "exec"), made)
        made["step"]()
    assert len(variables._names_of) < variables._MOST_CODES


class Phase(enum.Enum):
    WARM = 1
    MAIN = 2


class Progress(NamedTuple):
    seen: int = 0
    best: float = 1e9


@dataclass(frozen=True)
class Plan:
    left: int = 9


class Declaring:
    def add(self) -> None:
        global declared
        declared += 1


def of_all_kinds(items: Items) -> dict[str, Any]:
    phase, progress, plan, late, meter = Phase.WARM, Progress(), Plan(), False, Declaring()
    sums, counts, order = defaultdict[str, float](float), Counter[str](), OrderedDict[str, int]()
    met, shown = Counter[Phase](), {Phase.WARM: 0}
    window, history, outputs, bad = deque([0] * 70, maxlen=100), list[float](), list[torch.Tensor](), 0

    def spoil() -> None:
        nonlocal bad
        bad += 1

    for item in items:
        phase = Phase.MAIN if item >= 3 else phase
        late = late or item == 2
        progress = progress._replace(seen=progress.seen + 1)
        plan = Plan(plan.left - 1)
        sums["loss"] += item
        counts["seen"] += 1
        order[f"at {item}"] = item
        window.append(item)
        history += [0.5 * item] * 100
        outputs.append(torch.full((2,), float(item)))
        met[phase] += 1
        shown[phase] = item
        spoil()
        meter.add()
    return {
        "phase": phase,
        "progress": progress,
        "plan": plan,
        "late": late,
        "sums": sums,
        "counts": counts,
        "bad": bad,
        "order": order,
        "window": list(window),
        "history": history,
        "outputs": torch.stack(outputs).tolist(),
        "declared": declared,
        "met": met,
        "shown": shown,
    }


def test_values_of_all_kinds_go_on_in_a_function_that_enters_in_the_middle() -> None:
    global declared
    declared = 0
    whole = of_all_kinds(Items(0, 8))
    declared = 0
    first = Items(0, 5)
    of_all_kinds(first)
    declared = 0
    assert of_all_kinds(Items(4, 8, first.told)) == whole


def averaging(items: Items, *, dead: bool) -> torch.Tensor:
    average = torch.zeros(5_000)
    for item in items:
        if dead:
            average = torch.zeros(5_000)
        average = 0.9 * average + item
    return average


def test_what_is_large_and_may_still_be_read_is_refused_and_what_is_made_anew_is_no_matter() -> None:
    first = Items(0, 5)
    averaging(first, dead=False)
    with pytest.raises(UnprovedError, match=r"average of averaging\(\)"):
        averaging(Items(4, 6, first.told), dead=False)

    def made_anew(items: Items) -> float:
        best = 0.0
        for item in items:
            large = torch.full((5_000,), float(item))
            best = max(best, float(large.sum()))
        return best

    first = Items(0, 5)
    made_anew(first)
    assert made_anew(Items(4, 6, first.told)) == made_anew(Items(0, 6))


def test_a_class_that_a_function_has_made_is_found_by_what_stands_in_its_place() -> None:
    def local(items: Items) -> Any:
        class Stage(enum.Enum):
            ONE = 1
            TWO = 2

        stage, none = Stage.ONE, None
        for item in items:
            stage = Stage.TWO if item == 1 else stage
            none = Stage.ONE if item == 1 and items.last == 9 else none
        return stage.name, none

    first = Items(0, 3)
    local(first)
    assert local(Items(2, 4, first.told)) == ("TWO", None)
    lost = Items(0, 9)
    local(lost)
    with pytest.raises(UnprovedError, match=r"none of .*local\(\)"):
        local(Items(8, 9, lost.told))


def test_a_long_history_that_loops_only_add_to_begins_anew_and_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    def plotted(items: Items) -> int:
        losses = list[float]()
        for item in items:
            losses.append(float(item))
        return len(losses)

    def deciding(items: Items) -> float:
        losses = list[float]()
        for item in items:
            losses.append(float(item))
            if sum(losses[-5:]) < 0:
                break
        return losses[-1]

    long = Items(0, variables.ENTRIES + 9)
    plotted(long)
    assert plotted(Items(0, 3, long.told)) == 3
    assert "losses of" in capsys.readouterr().err
    deciding(long)
    with pytest.raises(UnprovedError, match=r"losses of .*deciding\(\)"):
        deciding(Items(0, 3, long.told))


def squares(items: Items) -> int:
    square = 0
    for item in items:
        square = item * item
    return square


def test_what_is_dead_is_not_told() -> None:
    items = Items(0, 4)
    assert squares(items) == 9
    told = {name for one in variables._decode(items.told) for name in one.plain} if items.told else set()
    assert "square" not in told, "it is assigned in each turn before it is read"
