"""Hidden state: what a rank's objects keep in attributes that the script has not told of, found by looking.

modules, objects in extra     looked at in the first calls, and then now and then; kept in the private record
step functions                generators that they take from around them: the same
samplers of a loader          looked at when a loop begins; what moves is a part of the loop's mark
datasets, collate functions   looked at between items; what moves is a part of the record of the item
loaders between their loops   in the private record, as the loop that comes begins with it
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import torch
from msgspec import Struct
from torch.utils.data import BatchSampler, DataLoader

from torchrelay.errors import RefusedError, UndeclaredError
from torchrelay.worker.hidden_state import graph, variables
from torchrelay.worker.hidden_state.around import Outsiders, of_modules, variables_around
from torchrelay.worker.hidden_state.leaves import is_of_library
from torchrelay.worker.hidden_state.moving import Moving
from torchrelay.worker.hidden_state.signatures import FIRST
from torchrelay.worker.hidden_state.still import Still
from torchrelay.worker.hidden_state.told import FRAME, There, differing, put_back
from torchrelay.worker.parallel.of_state import is_told
from torchrelay.worker.tensors import absent
from torchrelay.worker.tensors.by_hand import ByHand

EARLY = 10  # calls in which a script is refused for what a fault would need
SHARE = 500  # a further one only if so many times as long has passed as it takes
STATE_LEAVES = 1 << 15
_OURS_ALONE = (list, tuple, range, dict, str, bytes, torch.Tensor)  # these have no attributes to look at


class HiddenRecord(Struct, array_like=True):
    """What of the hidden state is told in a private record."""

    state: bytes
    resting: list[tuple[str, bytes]]  # objects of loaders through which no loop goes
    late: list[str]  # what was seen to change after the gate of a call
    lacking: dict[str, str] = {}  # what changes and cannot be told, see `absent`
    untold: list[str] = []  # what calls replace, and is not told: nothing is there until a call has replaced it
    ready: dict[str, bytes] = {}  # objects of libraries that have changed once, see `Inside`
    gradients: dict[str, bytes] = {}  # of tensors trained by hand, see `by_hand`


_decode = msgspec.msgpack.Decoder(HiddenRecord).decode
_decode_parts = msgspec.msgpack.Decoder(list[tuple[str, bytes]]).decode


class Seen:
    """An object of a loader, and what of it moves."""

    def __init__(self, name: str, thing: Any, beside: str, passed: Callable[[], Iterable[Any]]) -> None:
        self.name = f"{name} {type(thing).__module__}.{type(thing).__qualname__} {beside}"
        self.open = 0  # loops that go through it
        self.stirred = False  # a call has gone through it since the item of such a loop was fetched
        reference = weakref.ref(thing)
        orders = name in ("sampler", "batch_sampler")

        def roots() -> list[tuple[str, Any]]:
            live = reference()
            return [] if live is None else [(name, live)]

        self.moving = Moving(roots, passed=passed, orders=orders, rows=name == "collate_fn")
        self.looks = Budget()


class Budget:
    """Whether it is time for a look: the first ones, and then as long as they cost next to nothing."""

    def __init__(self) -> None:
        self._made = 0
        self._last = self._cost = 0.0

    def due(self, share: int = SHARE) -> bool:
        return self._made < FIRST or time.perf_counter() - self._last > share * self._cost

    def spend(self, look: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        found = look()
        self._last = time.perf_counter()
        self._cost = self._last - begin
        self._made += 1
        return found


class OfLoader:
    """The hidden state of one loader: of its samplers, its dataset and what makes items of it."""

    def __init__(self, hidden: Hidden, parts: list[Seen]) -> None:
        self._hidden = hidden
        self._parts = parts

    def mark(self) -> bytes:
        """Just before a loop begins: what it takes to begin it again. Raises `RefusedError`."""
        self.look(SHARE // 10)
        for part in self._parts:
            part.moving.begin()
        told = [(part.name, part.moving.record(part.moving.generators())) for part in self._parts]
        return _together(told)

    def before_item(self, number: int) -> bytes:
        """Just before item `number` (from 0) is fetched: what it takes to make it again. Raises `RefusedError`."""
        if 0 < number < 4 or number & (number - 1) == 0:
            self.look()
        for part in self._parts:
            part.stirred = False
        moved = [(part.name, part.moving.record()) for part in self._parts if part.moving.kept]
        return _together(moved) if moved else b""

    def look(self, share: int = SHARE) -> None:
        """See what has moved, if it is time for it. Raises `RefusedError`."""
        for part in self._parts:
            if part.looks.due(share):
                part.looks.spend(part.moving.look)

    def put(self, told: bytes) -> None:
        """Make it so. Raises `StateMismatchError`."""
        if not told:
            return
        by_name = dict(_decode_parts(told))
        for part in self._parts:
            if part.name in by_name:
                part.moving.put(by_name[part.name])

    def enter(self) -> None:
        """A loop begins."""
        for part in self._parts:
            part.open += 1

    def leave(self) -> None:
        """It has ended."""
        for part in self._parts:
            part.open -= 1

    def within_call(self) -> None:
        """A loop begins inside a call, which may be redone."""
        self._hidden.touched([(part, part.moving.mark(part.moving.generators())) for part in self._parts])
        for part in self._parts:
            part.stirred = True


def _together(told: list[tuple[str, bytes]]) -> bytes:
    told = [(name, data) for name, data in told if data]
    return msgspec.msgpack.encode(told) if told else b""


class _Called:
    """Functions of the script that are called in a step, and between steps."""

    def __init__(self, roots: list[tuple[str, Any]], steps: list[Any]) -> None:
        self._roots = roots
        self._steps = steps

    def __iter__(self) -> Iterator[Any]:
        modules = [inner for _, root in self._roots if isinstance(root, torch.nn.Module) for inner in root.modules()]
        return itertools.chain(list(self._steps), of_modules(modules), variables.called())


class Hidden:
    """All of it, of one rank."""

    def __init__(
        self,
        told: Iterable[tuple[str, Any]] = (),
        *,
        carried: Iterable[Any] = (),
        quiet: bool = False,
        known: Callable[[], Iterable[Any]] | None = None,
    ) -> None:
        """`told`: modules and other objects that protect() was given. `carried`: what others carry.

        `quiet`: the script has functions of its own that may carry more. `known`: all that the state is made of.
        """
        self._roots = list(told)
        self._seen: dict[int, tuple[Any, Seen]] = {}  # by the object's id, with a weak reference
        given = {id(thing) for _, thing in self._roots}
        others = [thing for thing in carried if id(thing) not in given]
        self._functions: list[Any] = []
        self._by_hand = ByHand()
        self.state = Moving(
            lambda: self._roots,
            functions=_Called(self._roots, self._functions),
            passed=lambda: [*others, *self._of_loops()],
            quiet=quiet,
            limit=STATE_LEAVES,
            variables=variables.objects,
            known=tuple if known is None else known,
            by_hand=self._by_hand,
        )
        self._outsiders = None if known is None or quiet else Outsiders(self._around, known)
        self._made: dict[str, int] = {}  # how many objects of this name there were
        self._waiting: list[tuple[str, bytes]] = []  # told of objects that the script has not come to yet
        self.late_paths: dict[str, None] = {}  # what updates change: seen to change after the gate of a call
        self._looks = Budget()
        self._calls, self._calm = 0, True  # calm: no call has begun yet
        self._looking = self._look_next = False  # at the call under way, and at the next one
        self._before = b""
        self._still: Still = self.state.still  # as it was found before the call under way
        self._remembered: list[Any] = []
        self._there: list[There] = []  # what is not told, as it was at the entry
        self._touched: list[tuple[Seen, bytes]] = []
        self._loaded = False
        self._known_of: Any = None  # what the two below were made of
        self._known_count = 0
        self._places: set[tuple[int, Any]] = set()
        self._holders: set[int] = set()
        self._never_late: set[str] = set()  # of what objects tell of themselves
        self._at_gate: bytes | None = None  # what the record of the last gate has told
        self._at_a_gate = False  # there is one, and its record is yet to be made
        self.late = b""  # what updates change, as it was when the last call had returned

    def _of_loops(self) -> list[Any]:
        """What libraries have made and tracked loops go through: a data set that streams tells itself where it is."""
        return [thing for reference, _ in list(self._seen.values()) if is_of_library(type(thing := reference()))]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to tell: asked twice in every call."""
        state = self.state
        told = (state.kept, state.lacking, self._waiting, len(state.untold), state.inside.ready, self._by_hand)
        return not (any(told) or any(one.moving.kept for _, one in list(self._seen.values())))

    def carries(self, holder: Any, name: str, value: Any) -> bool:
        """Whether a replacement gets what stands here under this name, or what this value holds."""
        kept = self.state.kept
        if self._known_of is not kept or len(kept) != self._known_count:
            self._known_of, self._known_count = kept, len(kept)
            self._places = {(id(leaf.holder), leaf.name) for leaf in kept.values()}
            self._holders = {id(leaf.holder) for leaf in kept.values()}
        return (id(holder), name) in self._places or id(value) in self._holders

    def _around(self) -> Iterator[graph.Leaf]:
        return itertools.chain(variables_around(self._functions), variables.held())

    def add(self, function: Any) -> None:
        """A step function: what it takes from around it is looked at, too."""
        self._functions.append(function)
        self.state.calm()

    # ------------------------------------------------------------ loaders

    def of(self, loader: Any) -> OfLoader | None:
        """What is looked at of this loader; None if there is nothing."""
        named = _objects_of(loader)
        beside = f"of {_length(loader)} samples"  # which tells it from the others of a script
        parts = [one for name, thing in named if (one := self._find(name, thing, named, beside)) is not None]
        return OfLoader(self, parts) if parts else None

    def _find(self, name: str, thing: Any, named: list[tuple[str, Any]], beside: str) -> Seen | None:
        found = self._seen.get(id(thing))
        if found is not None and found[0]() is thing:
            return found[1]
        number = id(thing)
        try:
            reference = weakref.ref(thing, lambda _: self._seen.pop(number, None))
            others = [weakref.ref(other) for _, other in named if other is not thing]
        except TypeError:
            return None  # it has nowhere to keep anything
        seen = Seen(name, thing, beside, lambda: [live for other in others if (live := other()) is not None])
        self._seen[number] = reference, seen
        self._made[seen.name] = self._made.get(seen.name, 0) + 1
        if self._loaded:
            self._give([seen])
        return seen

    def touched(self, parts: list[tuple[Seen, bytes]]) -> None:
        """These are gone through by the call under way, and were so before."""
        known = {id(part) for part, _ in self._touched}
        self._touched += [(part, told) for part, told in parts if id(part) not in known]

    # ------------------------------------------------------------ calls

    def mark(self) -> None:
        """At the entry of a call: what is known to move is put back if it is redone. Raises `RefusedError`."""
        absent.check()
        if self._outsiders is not None and self._outsiders.stirred:
            self._look_outside()
        self._before = self.state.mark() if self.state.kept else b""
        self._there = self.state.untold.here()
        self._remembered, self._touched, self._looking = [], [], False
        self._enter()

    def remember(self) -> None:
        """Whatever the call under way changes can be put back, as far as it is small."""
        self.state.calm()
        self._remembered = self.state.remember()
        self._enter()

    def look_entry(self, *, only_if_stirred: bool = False) -> None:
        """At the entry of a call that is looked at, or of any other one. Raises `RefusedError`."""
        self._calls += 1
        if self._calm:
            self.state.calm()
            self._look_outside()
        elif (not only_if_stirred and self._looks.due()) or self._look_next or self._has_changed():
            self._looks.spend(self._look)
        else:
            return
        self._calm, self._looking, self._look_next = False, True, False
        self.state.untold.enter()
        self._before = self.state.mark() if self.state.kept else b""
        self._remembered = self.state.remember()
        self._enter()

    def stir(self) -> None:
        """Something has changed that is not seen in passing: there is a look at the entry of this call."""
        self._look_next = True

    def _enter(self) -> None:
        self._still = self.state.still
        self._still.enter()
        self.state.inside.enter()
        self._by_hand.enter()

    def _look(self) -> None:
        self._look_outside()
        self._look_state()

    def _look_state(self, *, in_call: bool = False) -> list[str]:
        untold = self.state.untold
        known = len(untold.paths)
        changed = self.state.look(in_call=in_call)
        for path in list(untold.paths)[known:]:
            if is_told(path, self._roots):
                del untold.paths[path]
        return changed

    def _look_outside(self) -> None:
        """Raises `RefusedError` in the first calls. Later a job is not ended for what no fault may ever ask for."""
        for path in self._outsiders.look() if self._outsiders is not None else ():
            if self._calls <= EARLY:
                raise RefusedError(absent.OUTSIDE.format(path), absent.OUTSIDE_REMEDY)
            if path not in self.state.lacking:
                self.state.lacking[path] = absent.say(path, absent.COPY)

    def look_gate(self) -> None:
        """At its gate. Raises `RefusedError`."""
        absent.check()
        self.state.inside.prove(self.state.leaves)
        if self._looking or self.state.still.has_stirred() or self.state.inside.has_stirred():
            self._look_in_call()
        self.state.inside.pass_gate()
        self._by_hand.pass_gate()
        self._at_gate, self._at_a_gate = None, True

    def look_return(self) -> None:
        """When it has returned: what has changed since the gate is lost if the process dies in between."""
        if self._looking or self._has_changed():
            self._note_late(self._look_in_call())
            self.state.untold.paths.update(dict.fromkeys(self.state.inside.leave()))
            self._looking = False
        if self._at_gate is not None and self._at_gate != (now := self.now()):
            self._note_late(differing(self._at_gate, now, kept=self.state.kept))
        self._by_hand.leave()
        self.late = self.state.record(only=self.late_paths)

    def _note_late(self, paths: Iterable[str]) -> None:
        """These have changed after the gate: at times, or only now."""
        new = [path for path in paths if path not in self.late_paths and path not in self._never_late]
        self.late_paths.update(dict.fromkeys(path for path in new if not is_told(path, self._roots)))
        self._never_late.update(path for path in new if path not in self.late_paths)

    def _has_changed(self) -> bool:
        return self.state.still.has_changed() or self.state.inside.has_stirred()

    def _look_in_call(self) -> list[str]:
        """What is another one than at the entry counts only if that was looked at."""
        changed: list[str] = self._looks.spend(lambda: self._look_state(in_call=self._looking))
        self._look_next = not self._looking or bool(self.state.untold.young)
        return changed

    def rewind(self) -> None:
        """Put back all as it was at the entry of the call. May be done twice. Raises `UnprovedError`."""
        absent.refuse_lacking(self.state.lacking, when=(absent.LARGE, absent.LIBRARY))
        self.state.inside.rewind(self.state.leaves())
        for there in self._there:
            there.put_back()
        put_back(self._remembered)
        self._still.rewind()
        self.state.put(self._before, again=True)
        self._by_hand.rewind()
        for part, told in self._touched:
            part.moving.put(told, again=True)

    # ------------------------------------------------------------ the record

    def record(self) -> bytes:
        """What a replacement needs of it, now."""
        if self.empty:
            return b""
        found = self.state.record()
        if self._at_a_gate:
            self._at_gate, self._at_a_gate = found, False
        resting = []
        for _, one in list(self._seen.values()):
            if one.moving.kept and (one.stirred or not one.open):
                resting.append((one.name, one.moving.record()))
                if self._made[one.name] > 1:
                    resting.append((one.name, b""))  # which of them it is cannot be told by the name
        state, parts, late = self.state, [*resting, *self._waiting], list(self.late_paths)
        untold, ready = [path for path in state.untold.all() if path not in state.kept], state.inside.ready
        told = HiddenRecord(found, parts, late, state.lacking, untold, ready, self._by_hand.tell())
        return msgspec.msgpack.encode(told)

    def now(self) -> bytes:
        """What calls and the script have made of it up to now. In the path of every step, and mostly nothing."""
        return self.state.record() if self.state.kept else b""

    def place(self, told: bytes) -> None:
        """On a replacement, on its way: as it was in that place. What is not there yet comes later."""
        self.state.put(told, lenient=True)

    def load(self, data: bytes) -> None:
        """Take that of this rank's last holder. Raises `StateMismatchError`."""
        self._loaded, self._calls = True, EARLY
        if not data:
            return
        told = _decode(data)
        absent.refuse_lacking(told.lacking)
        self.state.put(told.state)
        self.state.put_absent(told.untold)
        for path in sorted(self._by_hand.take(told.gradients).difference(told.untold)):
            if not path.startswith(graph.VARIABLE) and not variables.is_yet_to_be_made(path):
                raise absent.refusal(path)
        self.state.inside.expect(told.ready)
        self.late_paths = dict.fromkeys(told.late)
        self._waiting = list(told.resting)
        self._give([one for _, one in self._seen.values()])

    def borrow(self, lent: bytes, lost: Sequence[str]) -> None:
        """The record that was loaded is of a gate: what has changed after that is taken from another rank.

        `lost`: what nobody can lend, a row as a whole. Raises `UnprovedError` if nothing can be there instead.
        """
        rows = [path.removesuffix(FRAME) for path in lost if path.endswith(FRAME)]
        within = tuple(f"{row}[" for row in rows)
        gone = [path.removesuffix(FRAME) for path in lost if not path.startswith(within)]
        absent.note_lost(gone)
        for path in gone:
            if path in self.state.kept and graph.is_generator(self.state.kept[path].read()):
                raise absent.refusal(path)  # others hold it, too, and would go on with it
        self.late_paths |= dict.fromkeys(self.state.put(lent))
        self.state.put_absent(gone)
        self.late = self.state.record(only=self.late_paths)

    def _give(self, seen: Iterable[Seen]) -> None:
        """Objects that have come up take what was told of them."""
        for one in seen:
            told = {data for name, data in self._waiting if name == one.name}
            if not told:
                continue
            if len(told) > 1:
                raise UndeclaredError(
                    f"several objects ({one.name}) have changed each in its own way, and a replacement cannot tell "
                    "which is which. Give them to loops that are open while training goes on, or set_epoch()"
                )
            one.moving.put(told.pop())
            self._waiting = [(name, data) for name, data in self._waiting if name != one.name]


def _objects_of(loader: Any) -> list[tuple[str, Any]]:
    if not isinstance(loader, DataLoader):
        return [("dataset", loader)] if not isinstance(loader, _OURS_ALONE) else []
    fields = vars(loader)
    found = [("sampler", fields.get("sampler"))]
    batches = fields.get("batch_sampler")
    if type(batches) is BatchSampler:
        found[0] = ("sampler", batches.sampler)
    else:
        found.append(("batch_sampler", batches))
    found += [(name, fields.get(name)) for name in ("dataset", "collate_fn")]
    if fields.get("num_workers"):
        found = found[:-1]  # it is called in loader workers, which seed what they find
    if not type(loader).__module__.startswith("torch."):
        found.append(("loader", loader))  # what a class of the script's own keeps in it
    return [(name, thing) for name, thing in _once(found) if thing is not None and not isinstance(thing, _OURS_ALONE)]


def _length(loader: Any) -> int | None:
    dataset = vars(loader).get("dataset") if isinstance(loader, DataLoader) else loader
    try:
        return len(dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError, AttributeError):
        return None


def _once(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    known: set[int] = set()
    for name, thing in named:
        if id(thing) not in known:
            known.add(id(thing))
            yield name, thing
