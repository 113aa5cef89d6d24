"""Objects of libraries: what is in them is seen to change, and nothing of them is run."""

from __future__ import annotations

import configparser
import decimal
import io
import queue
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import networkx  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
from numpy.polynomial import Polynomial
from rich.progress import Progress
from sortedcontainers import SortedDict, SortedList  # type: ignore[import-untyped]
from torch import distributions, nn
from torch.utils.data import DataLoader

from torchrelay.errors import UnprovedError
from torchrelay.worker.hidden_state.hidden import Hidden
from torchrelay.worker.hidden_state.leaves import is_of_library, keeps_more
from torchrelay.worker.hidden_state.signatures import NODES, contents, glance_into
from torchrelay.worker.parallel import of_state
from torchrelay.worker.tensors import absent

LIBRARY = types.ModuleType("a_library")  # it has no file, as if it were none of the script's


def library(kind: type) -> type:
    """The class, as if a library had it."""
    kind.__module__ = LIBRARY.__name__
    return kind


@library
class Bag:
    """Anything."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


class Settings(NamedTuple):
    """Which cannot be told."""

    function: Callable[..., Any]


class Own:
    """Of the script's."""

    count = 0


class Raises:
    """Whatever it is asked."""

    def _raise(self, *_: Any) -> Any:
        raise AssertionError("code of the script's is run")

    __repr__ = __str__ = __eq__ = __len__ = __iter__ = __bool__ = _raise
    __hash__ = object.__hash__


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "sorted": (SortedList, lambda kept: kept.add(1.0)),
    "filed": (SortedDict, lambda kept: kept.update(a=1)),
    "graph": (networkx.Graph, lambda kept: kept.add_node(1)),
    "polynomial": (lambda: Polynomial([1.0]), lambda kept: kept.coef.__setitem__(0, 2.0)),
    "normal": (lambda: distributions.Normal(torch.zeros(1), torch.ones(1)), lambda kept: kept.loc.add_(1)),
    "bytes": (io.BytesIO, lambda kept: kept.write(b"a")),
    "sought": (lambda: io.BytesIO(b"ab"), lambda kept: kept.seek(1)),
    "buffer": (lambda: Bag(data=bytearray(4)), lambda kept: kept.data.__setitem__(0, 1)),
    "objects": (lambda: Bag(data=np.array([None, 1], dtype=object)), lambda kept: kept.data.__setitem__(0, 1)),
    "own": (lambda: Bag(inner=Own()), lambda kept: setattr(kept.inner, "count", 1)),
    "filed own": (lambda: SortedDict(a=Own()), lambda kept: setattr(kept["a"], "count", 1)),
    "queue": (queue.Queue, lambda kept: kept.put(1)),
    "context": (decimal.Context, lambda kept: setattr(kept, "prec", 3)),
    "settings": (configparser.ConfigParser, lambda kept: kept.add_section("a")),
    "masked": (lambda: np.ma.masked_array(np.zeros(2), mask=[False, True]), lambda kept: kept.__setitem__(0, 1.0)),
    "unmasked": (
        lambda: np.ma.masked_array(np.zeros(2), mask=[False, True]),
        lambda kept: setattr(kept, "mask", [True, True]),
    ),
    "generator": (lambda: Bag(draws=np.random.default_rng(1)), lambda kept: kept.draws.random()),
    "iterator": (lambda: Bag(comes=iter(range(9))), lambda kept: next(kept.comes)),
    "within": (lambda: Bag(inner=[{"a": Bag(value=1)}]), lambda kept: setattr(kept.inner[0]["a"], "value", 2)),
    "numpy": (lambda: Bag(seen=np.zeros(200_000)), lambda kept: kept.seen.__iadd__(1)),
    "tensor": (lambda: Bag(seen=torch.zeros(200_000)), lambda kept: kept.seen.add_(1)),
    "minus": (lambda: Bag(value=-1), lambda kept: setattr(kept, "value", -2)),
    "numbers": (lambda: Bag(seen={1, 2}), lambda kept: kept.seen.add(3)),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_is_in_them_is_seen_to_change(kind: str) -> None:
    make, change = CHANGES[kind]
    kept = make()
    assert is_of_library(type(kept))
    before = contents(kept)
    assert contents(kept) == before, "looking changes nothing"
    change(kept)
    assert contents(kept) != before


class Watching(torch.Tensor):
    """A tensor of a class of the script's."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise AssertionError("code of the script's is run")


@pytest.mark.parametrize(
    "kept",
    [
        Bag(lock=threading.Lock(), thread=threading.current_thread(), module=LIBRARY, function=len, kind=Bag),
        Bag(value=Raises(), within=[Raises()], keys={Raises(): 1}, row={Raises()}),
        Bag(file=io.BytesIO(), none=np.zeros((0, 3)), number=np.array(3.0), objects=np.array([Raises()], dtype=object)),
        Bag(odd=nn.UninitializedBuffer(), huge=10**5000, after=1),
        Bag(value=torch.zeros(2).as_subclass(Watching)),
        Bag(sparse=torch.eye(2).to_sparse(), meta=torch.zeros(2, device="meta"), nothing=torch.zeros(0)),
        Bag(text="\ud800", data=b"\xff", large="a" * 1_000_000, number=float("nan")),
    ],
    ids=["machinery", "raises", "arrays", "odd", "watching", "tensors", "texts"],
)
def test_nothing_of_them_is_run_and_nothing_raises(kept: Any) -> None:
    if hasattr(kept, "file"):
        kept.file.close()
    assert contents(kept) == contents(kept)


def test_what_they_hold_of_the_training_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    place = model.weight.untyped_storage().data_ptr()
    monkeypatch.setattr(of_state, "_of_state", lambda: ({place}, set()))
    kept: Any = Bag(
        model=model, parameters=list(model.parameters()), optimizer=torch.optim.SGD(model.parameters(), 0.1)
    )
    kept.array = model.weight.detach().numpy()
    before = contents(kept)
    with torch.no_grad():
        model.weight.add_(1)
    kept.optimizer.param_groups[0]["lr"] = 0.2
    assert contents(kept) == before


def test_a_look_at_a_large_one_takes_no_longer() -> None:
    @library
    class Large:
        def __init__(self) -> None:
            self.inside = [[number] for number in range(10 * NODES)]

    large = Large()
    before = contents(large)
    large.inside[-1].append(1)
    assert contents(large) == before, "the end of it is not looked at"
    large.inside[0].append(1)
    assert contents(large) != before


def test_containers_that_keep_more_than_entries() -> None:
    @library
    class Mirrored(dict[str, Any]):
        def __init__(self, **entries: Any) -> None:
            super().__init__(entries)
            self.__dict__ = self

    assert keeps_more(SortedDict(a=1)), "it has the order of its keys, too"
    assert not keeps_more(Mirrored(a=[1]))
    assert not keeps_more(Bag(a=[1])), "that is no container"


@pytest.mark.parametrize("kind", [Progress, DataLoader, nn.Linear, threading.Thread, type, object, int, Raises])
def test_what_is_for_people_or_no_librarys_is_let_be(kind: type) -> None:
    assert not is_of_library(kind)


class Trainer:
    """Its step is what is run."""

    def __init__(self, kept: Any, use: Callable[[Any], Any]) -> None:
        self.kept, self.use, self.steps = kept, use, 0

    def step(self) -> None:
        self.steps += 1
        self.use(self)


def life(trainer: Trainer, calls: int) -> Hidden:
    hidden = Hidden()
    hidden.add(trainer.step)
    for _ in range(calls):
        hidden.mark()
        hidden.look_entry()
        trainer.step()
        hidden.look_gate()
        hidden.look_return()
    return hidden


def taken_over(hidden: Hidden) -> Hidden:
    after = Hidden()
    after.add(Trainer(SortedList(), lambda _: None).step)
    after.load(hidden.record())
    return after


def test_a_fault_is_refused_by_its_name_and_it_is_said_before(capsys: pytest.CaptureFixture[str]) -> None:
    hidden = life(Trainer(SortedList(), lambda trainer: trainer.kept.add(trainer.steps)), 3)
    assert "Trainer.step.kept is an object of a library" in capsys.readouterr().err
    with pytest.raises(UnprovedError, match=r"Trainer\.step\.kept is an object of a library, and changes"):
        taken_over(hidden)
    with pytest.raises(UnprovedError, match="kept is an object of a library"):
        hidden.rewind()


def test_one_that_makes_itself_ready_is_not() -> None:
    def first(trainer: Trainer) -> None:
        if trainer.steps == 1:
            trainer.kept.add(1)

    taken_over(life(Trainer(SortedList(), first), 4))


def fit(number: float, at: int = 1) -> Callable[[Trainer], None]:
    """What fits a polynomial once, in step `at`."""

    def fitted(trainer: Trainer) -> None:
        if trainer.steps == at:
            trainer.kept.coef = np.array([number])

    return fitted


@pytest.fixture(autouse=True)
def nothing_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absent, "_lost", set())


def unfitted() -> Polynomial:
    return Polynomial([0.0])


def first_gate(hidden: Hidden, trainer: Trainer) -> None:
    hidden.mark()
    hidden.look_entry()
    trainer.step()
    hidden.look_gate()


@pytest.mark.parametrize("number", [1.0, 2.0])
def test_a_replacement_has_to_make_it_ready_in_its_first_step(number: float) -> None:
    def first(trainer: Trainer) -> None:
        if not trainer.kept.coef.any():
            trainer.kept.coef = np.array([number])

    record = life(Trainer(unfitted(), fit(1.0)), 4).record()
    after, trainer = Hidden(), Trainer(unfitted(), first)
    after.add(trainer.step)
    after.load(record)
    third = Hidden()
    third.add(trainer.step)
    third.load(after.record())
    if number == 1.0:
        return first_gate(after, trainer)
    with pytest.raises(UnprovedError, match=r"Trainer\.step\.kept is an object of a library that changed"):
        first_gate(after, trainer)
    with pytest.raises(UnprovedError, match="kept is an object of a library that changed"):
        third.look_gate()  # the replacement was lost before its own step


def test_one_that_is_made_ready_behind_a_gate_is_not_there() -> None:
    trainer = Trainer(unfitted(), lambda _: None)
    hidden = Hidden()
    hidden.add(trainer.step)
    first_gate(hidden, trainer)
    trainer.kept.coef = np.array([1.0])
    hidden.look_return()
    after, trainer = Hidden(), Trainer(unfitted(), lambda _: None)
    after.add(trainer.step)
    after.load(hidden.record())
    first_gate(after, trainer)  # which does not read it
    assert absent.is_absent(vars(trainer)["kept"])


def test_one_that_is_not_made_ready_is_not_what_it_was() -> None:
    after, trainer = Hidden(), Trainer(unfitted(), lambda _: None)
    after.add(trainer.step)
    after.load(life(Trainer(unfitted(), fit(1.0, 3)), 5).record())
    with pytest.raises(UnprovedError, match="kept is an object of a library that changed"):
        first_gate(after, trainer)


def test_one_that_changes_late_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    after, trainer = Hidden(), Trainer(unfitted(), lambda _: None)
    after.add(trainer.step)
    after.load(life(Trainer(unfitted(), fit(1.0, 20)), 25).record())
    first_gate(after, trainer)  # which does not read it
    assert absent.is_absent(vars(trainer)["kept"])
    assert "A fault ends the job" not in capsys.readouterr().err


@pytest.mark.parametrize("at", [1, 20])
def test_a_call_that_has_changed_one_is_not_made_again(at: int) -> None:
    trainer = Trainer(unfitted(), fit(1.0, at))
    hidden = life(trainer, at - 1)
    first_gate(hidden, trainer)
    with pytest.raises(UnprovedError, match="kept is changed where it lies"):
        hidden.rewind()


def test_what_an_update_has_changed_is_lost_until_the_next_gate() -> None:
    trainer = Trainer(unfitted(), lambda _: None)
    hidden = life(trainer, 3)
    first_gate(hidden, trainer)
    trainer.kept.coef = np.array([1.0])
    hidden.look_return()
    hidden.mark()
    hidden.look_entry()
    with pytest.raises(UnprovedError, match=r"kept changes after optimizer\.step"):
        hidden.rewind()
    hidden.look_gate()
    hidden.look_return()
    hidden.mark()
    hidden.look_entry()
    hidden.rewind()


@pytest.mark.parametrize("within", [Bag(coef=0.0), Bag(inner=Bag(coef=0.0)), Bag(rows=[]), SortedList()])
def test_a_first_change_is_noticed_though_no_look_is_due(monkeypatch: pytest.MonkeyPatch, within: Any) -> None:
    def change(trainer: Trainer) -> None:
        if trainer.steps < 20:
            return
        kept = trainer.kept
        if isinstance(kept, SortedList):
            kept.add(1.0)
        elif hasattr(kept, "rows"):
            kept.rows.append(1.0)
        else:
            getattr(kept, "inner", kept).coef += 1.0

    trainer = Trainer(within, change)
    hidden = life(trainer, 14)
    monkeypatch.setattr(hidden._looks, "due", lambda *_: False)
    for _ in range(7):
        hidden.mark()
        hidden.look_entry()
        trainer.step()
        hidden.look_gate()
        hidden.look_return()
    assert any(
        "kept" in path for path in [*hidden.state.lacking, *hidden.state.untold.all(), *hidden.state.inside.ready]
    )


def test_one_that_changes_in_each_step_is_not_looked_at_in_each(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = life(trainer := Trainer(SortedList(), lambda trainer: trainer.kept.add(trainer.steps)), 14)
    looks: list[int] = []
    look = hidden.state.look
    monkeypatch.setattr(hidden.state, "look", lambda **how: [looks.append(1), look(**how)][1])  # type: ignore[func-returns-value]
    monkeypatch.setattr(hidden._looks, "due", lambda *_: False)
    for _ in range(20):
        first_gate(hidden, trainer)
        hidden.look_return()
    assert len(looks) < 6


def test_a_glance_is_not_disturbed_by_a_thread() -> None:
    kept, ended = Bag(), threading.Event()

    def disturb() -> None:
        while not ended.is_set():
            for name in "abcdefgh":
                setattr(kept, name, 1)
            for name in "abcdefgh":
                delattr(kept, name)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        for _ in range(20_000):
            glance_into(kept)
    finally:
        ended.set()
        thread.join()


def test_glances_at_numbers_and_at_objects_can_be_compared() -> None:
    assert glance_into(Bag(kept=np.float64(1.0))) != glance_into(Bag(kept=Bag(a=1.0, b=2.0)))


def test_a_tuple_of_a_librarys_that_cannot_be_told_has_not_changed() -> None:
    settings = library(Settings)(len)
    hidden = life(trainer := Trainer(settings, lambda _: None), 3)
    first_gate(hidden, trainer)
    hidden.rewind()


def test_nor_is_the_call_after_a_change_that_no_look_has_seen() -> None:
    trainer = Trainer(unfitted(), lambda _: None)
    hidden = life(trainer, 3)
    hidden.mark()  # a call that is not looked at
    trainer.kept.coef = np.array([1.0])
    with pytest.raises(UnprovedError, match="kept is changed where it lies"):
        hidden.rewind()


def test_an_odd_value_hides_no_other() -> None:
    kept: Any = Bag(odd=nn.UninitializedBuffer(), count=1)
    before = contents(kept)
    kept.count = 2
    assert contents(kept) != before


def test_another_one_at_the_same_place_in_memory_has_not_changed() -> None:
    def another(trainer: Trainer) -> None:
        del trainer.kept
        trainer.kept = io.BytesIO(bytes(trainer.steps))

    hidden = life(Trainer(io.BytesIO(), another), 30)
    assert not hidden.state.lacking
    assert any("kept" in path for path in hidden.state.untold.all()), "a replacement has none"


def test_a_queue_for_which_a_thread_waits_is_the_threads_business() -> None:
    waiting: queue.Queue[int] = queue.Queue()
    taken: list[int] = []
    thread = threading.Thread(target=lambda: taken.append(waiting.get()))
    thread.start()
    while not waiting.not_empty._waiters:  # type: ignore[attr-defined]
        pass
    before = contents(waiting)
    waiting.put(1)
    thread.join()
    assert taken == [1]
    assert contents(waiting) == before


def test_what_is_gone_is_no_reason_any_more() -> None:
    def while_it_lasts(trainer: Trainer) -> None:
        if trainer.steps < 5:
            trainer.kept.add(trainer.steps)
        elif trainer.steps == 5:
            del trainer.kept

    assert not life(Trainer(SortedList(), while_it_lasts), 8).state.lacking


def test_one_that_gives_way_to_another_is_not_there() -> None:
    def another(trainer: Trainer) -> None:
        trainer.kept = SortedList([trainer.steps])

    after, trainer = Hidden(), Trainer(SortedList(), another)
    after.add(trainer.step)
    after.load(life(Trainer(SortedList(), another), 3).record())
    assert "kept" in repr(object.__getattribute__(trainer, "__dict__")["kept"].path)


def test_what_a_loop_goes_through_tells_itself_where_it_is() -> None:
    @library
    class Stream:
        def __init__(self) -> None:
            self.at = 0

        def __iter__(self) -> Iterator[int]:
            while self.at < 9:
                yield self.at
                self.at += 1

    stream = Stream()
    trainer = Trainer(stream, lambda trainer: setattr(trainer.kept, "at", trainer.kept.at + 1))
    hidden = Hidden()
    assert hidden.of(stream) is not None
    hidden.add(trainer.step)
    for _ in range(3):
        hidden.mark()
        hidden.look_entry()
        trainer.step()
        hidden.look_gate()
        hidden.look_return()
    taken_over(hidden)
