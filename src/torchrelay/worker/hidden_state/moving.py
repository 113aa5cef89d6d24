"""Moving: what of an object's attributes is seen to move while it is used, found by looking again and again.

A look walks the graph of an object and compares each leaf with what it was at the last look. What has changed is kept
from then on: `record` tells it, `put` makes it so in another process that has built the same.

    numbers, texts, small containers, small tensors and arrays    kept
    generators of random numbers, itertools.count                 kept
    what only grows                                               left alone: a cache, a data set's history
    what is large                                                 refused if an order of data comes from it, else said
    attributes beside one that cannot be kept                     kept if they move again and again: else they may tell
                                                                  of the other one, such as "the file is open"
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable
from types import CellType
from typing import Any

import msgspec
import torch

from torchrelay.errors import RefusedError, StateMismatchError
from torchrelay.worker.hidden_state import doers, generators, graph, made, signatures, still, told, variables
from torchrelay.worker.hidden_state.around import variables_around
from torchrelay.worker.hidden_state.graph import ENTRIES, MISSING, STANDS, VARIABLE, Leaf, Walk
from torchrelay.worker.hidden_state.leaves import Named, NamedLeaf, Within
from torchrelay.worker.hidden_state.made import Filled, are_same, holds_objects, only_grew
from torchrelay.worker.hidden_state.signatures import EACH, SMALL, Inside, is_small, signature_of
from torchrelay.worker.hidden_state.still import Still
from torchrelay.worker.parallel import of_state
from torchrelay.worker.source.lines import is_of_the_script
from torchrelay.worker.tensors import absent, memory, values
from torchrelay.worker.tensors.absent import GROWS, ITERATOR, LARGE, OBJECTS
from torchrelay.worker.tensors.by_hand import ByHand

LIMIT = 48 << 10  # bytes of all that is kept of one object

_encode = msgspec.msgpack.encode
GETS_READY = 3  # looks in which functions that cannot be found by a name may still come up
_NO_VALUES = ("object", "iterator")
_QUICK = frozenset({float, str, bool, type(None)})


class Moving:
    """What of these objects moves."""

    def __init__(
        self,
        roots: Callable[[], Iterable[tuple[str, Any]]],
        *,
        passed: Callable[[], Iterable[Any]] = tuple,
        functions: Iterable[Any] | None = None,
        variables: Callable[[], Iterable[Leaf]] = tuple,
        orders: bool = False,
        rows: bool = False,
        quiet: bool = False,
        limit: int = graph.MAX_LEAVES,
        known: Callable[[], Iterable[Any]] = tuple,
        by_hand: ByHand | None = None,
    ) -> None:
        """`roots`: the objects, with their names. `passed`: objects that others look at. `orders`: of the data.
        `rows`: those that only grow are no histories, but what is left over for the next item.

        `functions`: what they use from around them is looked at, too; then of objects only the script's own.
        `variables`: of functions that are under way; a replacement may not have come to them yet.
        """
        self._roots, self._passed = roots, passed
        self._functions, self._variables = functions, variables
        self._orders, self._rows_count = orders, rows
        self._quiet, self._known, self._limit = quiet, known, limit
        self.kept: dict[str, Leaf] = {}
        self._noted: set[str] = set()  # paths that were seen to change once
        self._unsure: set[str] = set()  # of those, the ones that count if they change once more
        self._restless: dict[Any, int] = {}
        self.still = Still()
        self._by_hand = None if quiet else by_hand
        self._met: set[str] = set()  # paths of objects and containers at the last look
        self._walk = self._go()
        self._seen: dict[str, Any] = {}
        self._begun: dict[str, Any] = {}  # references to the tensors that were there before the first call
        self._told: dict[str, Any] = {}  # and to those of which the last record tells
        self._marked: dict[str, Any] = {}
        self._rows: dict[str, tuple[int, int, int]] = {}
        self._first_of: dict[int, str] = {}  # by the id of a tensor, the first path at which it was told
        self.inside = Inside()
        self.calm()
        self._times: dict[str, int] = {}  # how often a path was seen to change
        self._warned: set[str] = set()
        self.lacking: dict[str, str] = {}  # what moves and cannot be carried, with what it is
        self._large: dict[str, int] = {}  # by path, the id of what was there
        self.untold = told.Untold()
        self._looks = 0
        self._before_loop: dict[str, tuple[int, str]] = {}  # iterators that were there before a loop began

    def look(self, *, in_call: bool = False) -> list[str]:
        """What has changed since the last look; it is kept from now on. Raises `RefusedError` for what cannot be.

        `in_call`: the last look was at the entry of the call under way.
        """
        self.still.note_names()
        now = self._signatures()
        if now is None:
            return []
        before, self._seen = self._seen, now
        self._check_iterators()
        changed = [path for path, sign in now.items() if not are_same(before.get(path, MISSING), sign)]
        changed = still.counting(changed, now, () if in_call else self._walk.of_data)
        tied: dict[int, bool] = {}  # holders of what changes and is not carried, and whether that is large
        for path in changed:
            leaf, large = self._walk.leaves[path], told.is_large(self._walk.leaves[path])
            if leaf.holder is not None and (large or now[path][0] in _NO_VALUES):
                tied[id(leaf.holder)] = large or tied.get(id(leaf.holder), False)
        found = [path for path in changed if self._judge(path, told.before(before, path), tied)]
        if self._functions is not None:
            inside, untold = self.inside.note(before, now, self._walk.leaves, self.lacking)
            self.untold.paths.update(dict.fromkeys(untold))
            passed = inside.union(self.kept)
            new = [path for path in changed if (in_call or self._is_odd(path)) and path not in passed]
            self._note_untold([(path, told.before(before, path)) for path in new])
        self._looks += 1
        self.kept = {path: self._walk.leaves.get(path, leaf) for path, leaf in self.kept.items()}
        self._noted.update(set(changed) - self._unsure)
        self._note_growth()
        self._large = {path: id(leaf.value) for path, leaf in self._walk.leaves.items() if told.is_large(leaf)}
        self._let_go()
        return found

    def leaves(self) -> dict[str, Leaf]:
        """All that is there now; nothing if another thread is changing it."""
        try:
            return self._go().leaves
        except RuntimeError:
            return {}

    def _note_untold(self, changed: list[tuple[str, Any]]) -> None:
        self.untold.settle()
        for path, before in changed:
            value, known = self._walk.leaves[path].value, self._large.get(path, 0)
            if path not in self.lacking:
                self.untold.note(path, value, is_first=told.is_nothing(before), is_another=known not in (0, id(value)))
            if len(self.untold) > told.MOST and not self.lacking:
                self.lacking.setdefault(path, LARGE)  # the record has no room for it
        self.untold.find(self._walk.leaves | self._walk.opened)

    def _note_growth(self) -> None:
        """A list or deque that steps add to, of what cannot be carried: such as what a network learns from again."""
        before, self._rows = self._rows, {}
        for path, leaf in self._walk.opened.items() if self._functions is not None else ():
            row = leaf.value
            if type(row) in (list, deque) and row and leaf.holder is not None:
                self._rows[path] = now = (id(row), len(row), id(row[-1]))
                known = before.get(path, now)
                is_same = (known[0] == now[0] and known != now) and not doers.is_row(row)
                if is_same and not told.is_told(row) and Filled(row).tell() is None:
                    self.lacking.setdefault(path, GROWS)

    def _go(self) -> Walk:
        if self._functions is None:
            return Walk(self._roots(), passed=self._passed(), limit=self._limit)
        found = itertools.chain(variables_around(self._functions), self._variables())
        passed = self._passed()
        return Walk(self._roots(), passed=passed, variables=found, looks_into=is_of_the_script, limit=self._limit)

    def calm(self) -> None:
        """What has changed up to now means nothing: the script has made its objects ready."""
        self._seen = self._signatures() or self._seen
        self.inside.begin(self._seen, self._walk.leaves)
        self._begun = {path: told.reference(leaf.value) for path, leaf in self._walk.leaves.items()}
        self._let_go()

    def _signatures(self) -> dict[str, Any] | None:
        """What all leaves are now; None if another thread is changing them."""
        try:
            self._walk = self._go()
            signatures.walked(self._walk.objects)
            return {path: signature_of(leaf.value) for path, leaf in self._walk.leaves.items()}
        except RuntimeError:  # a dict or deque has changed its size under our eyes
            return None

    def _let_go(self) -> None:
        """Hold nothing that is large or the script's business: what a step has computed would not be freed."""
        for path, leaf in self.kept.items():
            if self._walk.leaves.get(path) is leaf:
                leaf.remember_way(self._walk.parents, variables.finder(path))
        if self._by_hand is not None:
            self._by_hand.know(self._walk.leaves.values())
        if self._functions is not None:
            self.still = still.found(self._walk, self.kept, self._noted, self._restless)
        self._met = {*self._walk.holders, *self._walk.opened}
        walk = self._walk
        for held in (walk.holders, walk.objects, walk.hooks, walk.parents, walk.absent, walk.opened, walk.containers):
            held.clear()
        for path, leaf in self._walk.leaves.items():
            if not is_small(leaf.value) and not (leaf.holder is None and path in self.kept):
                leaf.value = None

    def begin(self) -> None:
        """A loop begins: an iterator that is there already, and moves in the loop, is gone on with in the next one."""
        self._before_loop = generators.iterators(self._walk.leaves) if self._orders else {}

    def _check_iterators(self) -> None:
        now = generators.iterators(self._walk.leaves) if self._before_loop else {}
        for path, (number, place) in self._before_loop.items():
            if path in now and now[path][0] == number and now[path][1] != place:
                raise absent.epochs_on(path)

    def _judge(self, path: str, before: Any, tied: dict[int, bool]) -> bool:
        """Whether this leaf, which has changed, is to be kept."""
        leaf = self._walk.leaves[path]
        if isinstance(leaf.value, (Filled, Named)):
            entries = isinstance(leaf.value, Filled)
            return self._judge_entries(path, leaf, before) if entries else self._judge_doer(path, leaf, before)
        kind = self._seen[path][0]
        if kind in _NO_VALUES or path in self.kept:
            self._check_iterator(path, before)
            return False
        if isinstance(leaf.value, torch.Tensor) and not self._may_be_told(leaf.value):
            return False
        if only_grew(before, self._seen[path]) and not self._may_be_counted(leaf.value):
            return False
        if told.is_nothing(before) and not self._is_no_cache(leaf) and (path.endswith("]") or kind == "tensor"):
            return False  # an entry of a cache
        if before is MISSING and type(leaf.holder) is CellType:
            return False  # a function has come up, and with it what it has from around it
        if (size := signatures.size_of(leaf.value)) > EACH:
            if before is not MISSING:
                self._too_large(path, size)
            return False
        self._times[path] = self._times.get(path, 0) + 1
        if id(leaf.holder) in tied and not graph.is_generator(leaf.value):
            # Flags of a cache that is too large would tell of entries that a replacement does not have.
            flags = tied[id(leaf.holder)] and (type(leaf.value) not in graph.PLAIN or type(leaf.value) is bool)
            # A number may be set but once, with the object that it tells of; a container is filled by itself.
            if flags or (self._times[path] < 2 and type(leaf.value) in graph.PLAIN):
                self._unsure.add(path)
                return False
            self._unsure.discard(path)
        self.kept[path] = leaf
        return True

    def _is_odd(self, path: str) -> bool:
        """Whether it is a tensor without plain memory. Of large ones the script may make the same between calls."""
        value = self._walk.leaves[path].value
        return isinstance(value, torch.Tensor) and memory.refusal(value) is not None

    def _may_be_told(self, tensor: torch.Tensor) -> bool:
        """Not what has no plain memory; what is trained by hand only if no function of the script's may tell it."""
        return memory.refusal(tensor) is None and not (self._quiet and of_state.is_free(tensor))

    def _is_no_cache(self, leaf: Leaf) -> bool:
        """Whether steps keep it in a row, or it is as small as a loss: what is filled but once does no harm."""
        few = type(leaf.value) in (torch.Tensor, torch.nn.Parameter) and leaf.value.numel() <= SMALL
        return self._functions is not None and (few or type(leaf.name) is Within or type(leaf.holder) is list)

    def _may_be_counted(self, value: Any) -> bool:
        """What has more entries than before may be a cache; but rows are told, and of steps what is small."""
        if type(value) in (list, deque):
            return self._functions is not None or self._rows_count
        return self._functions is not None and len(value) <= SMALL

    def _judge_entries(self, path: str, leaf: Leaf, before: Any) -> bool:
        """Objects have come up in a container, or it has come up itself."""
        if path in self.kept or not leaf.value.container:
            return False
        if leaf.value.tell() is not None:
            self.kept[path] = leaf
            return True
        here = leaf.value.container
        if before is not MISSING and isinstance(here, dict) and not made.holds_arrays(here):
            self.lacking[path] = OBJECTS
        return False

    def _judge_doer(self, path: str, leaf: Leaf, before: Any) -> bool:
        """Another function, or an object of another class, stands in the place of one, or of a value."""
        place = path.removesuffix(STANDS)
        is_new = before is MISSING and place.rpartition("[" if place.endswith("]") else ".")[0] not in self._met
        if path in self.kept or is_new or not told.may_count(leaf.value.value, before, ready=self._looks >= GETS_READY):
            return False
        self.kept[path] = leaf
        return True

    def _check_iterator(self, path: str, before: Any) -> None:
        """Raises `RefusedError` for one that steps go on with."""
        leaf, now = self._walk.leaves[path], self._seen[path]
        if self._functions is None or now[0] != "iterator" or before is MISSING or before[0] != "iterator":
            return
        if before[1] == now[1] or before[1][0] != now[1][0] or variables.is_walked(leaf.value):
            return
        self.lacking[path] = ITERATOR
        if not path.startswith(VARIABLE):
            raise absent.steps_on(path)

    def _too_large(self, path: str, size: int) -> None:
        if self._orders:
            raise absent.order_too_large(path, size, EACH)
        value = self._walk.leaves[path].value
        if isinstance(value, torch.Tensor) and memory.place(value) in told.places_of(self._known()):
            return  # a buffer, by another way
        if self._large.get(path) == id(value) and self._seen[path][0] == "tensor":
            self.lacking[path] = LARGE
        self._warn(path, absent.too_large(path, size, EACH))

    def _warn(self, about: str, message: str) -> None:
        if about.startswith(VARIABLE):
            return  # most of it is for people
        if about not in self._warned and not self._quiet:
            self._warned.add(about)
            print(f"torchrelay: {message}", file=sys.stderr, flush=True)

    # ------------------------------------------------------------ to remember and to put back

    def remember(self) -> list[tuple[Leaf, Any, Any]]:
        """All small values, and references to what else steps may replace, to be put back by `told.put_back`."""
        try:
            return told.remembered(self._go().leaves.values())
        except RuntimeError:  # as above
            return []

    # ------------------------------------------------------------ to tell and to take

    def generators(self) -> dict[str, Leaf]:
        """All generators that were seen at the last look."""
        return {path: leaf for path, leaf in self._walk.leaves.items() if graph.is_generator(leaf.value)}

    def mark(self, more: dict[str, Leaf] | None = None) -> bytes:
        """The same as `record`, to be put back here with `again`."""
        found = self.record(more)
        self._marked = self._told
        return found

    def record(self, more: dict[str, Leaf] | None = None, only: Collection[str] | None = None) -> bytes:
        """The values now of what is kept, or `only` of these paths, and of `more`; empty if there is nothing.

        Raises `RefusedError`.
        """
        kept = self.kept if not more else {**more, **self.kept}
        kept = kept if only is None else {path: kept[path] for path in only if path in kept}
        if not kept:
            return b""
        entries = []
        self._told, self._first_of = {}, {}
        for path in sorted(kept):  # and not in the order in which it was found
            kept[path].find()
            entries += self._entry(path, kept[path])
        held, others = told.of_entries(kept[path] for path in sorted(kept))
        for path in sorted(others.keys() - kept.keys()):
            entries += self._entry(path, others[path], moved=True)
        found = _encode([*((path, one, False, False) for path, one in held.items()), *entries])
        if len(found) > LIMIT:
            rows = [path.removesuffix(told.FRAME) for path in held]
            return self.record() if more else self._shortened(entries, len(found), rows)
        return found

    def _entry(self, path: str, leaf: Leaf, *, moved: bool = False) -> list[tuple[str, Any, bool, bool]]:
        """What is told of it, if anything."""
        value = leaf.read()
        kind = type(value)
        moved = moved or path in self.kept
        if value is MISSING:
            return []
        if kind is Named:
            first = self._first_of.setdefault(id(value.value), path)
            return [(path, told.tell_doer(path, value.value, first), True, moved)]
        named = self.kept.get(path + STANDS)
        if doers.is_function(value) or isinstance(value, torch.nn.Module) or (named and named.read() is not MISSING):
            return []  # no value any more
        if not told.can_be_told(value):
            self.lacking[path] = OBJECTS if kind is Filled else LARGE
            return []
        value = value.copy() if kind in graph.FILLABLE else value  # a thread may put anything into it
        if kind in graph.FILLABLE and holds_objects(value):
            return []  # it was plain before; they are told by themselves
        if kind in _QUICK or (kind is int and -(1 << 63) <= value < 1 << 63):
            return [(path, value, False, moved)]
        self._told[path] = reference = told.reference(value)
        if made.is_result(value):
            return [(path, values.encode([made.RESULT, value.detach()], path), True, moved)]
        begun = self._begun.get(path)
        replaced = reference is not None and (begun is None or begun() is not value)
        if replaced and self._first_of.setdefault(id(value), path) != path:
            return [(path, values.encode([told.SAME, self._first_of[id(value)]], path), True, moved)]
        return [(path, told.tell(path, value, replaced=replaced), True, moved)]

    def _shortened(self, entries: list[Any], size: int, rows: list[str]) -> bytes:
        """Too much moves: of an order of data that cannot be; of all else as much is kept as there is room for.

        Of rows that are not told to their end a replacement would have another one.
        """
        said = absent.too_much(itertools.islice(sorted(self.kept), 3), size, LIMIT)
        if self._orders:
            raise RefusedError(said, "keep less in attributes, or let it follow from the epoch (set_epoch)")
        self._warn("", f"{said}. If results depend on them, keep them in buffers, or give them to protect(state=...)")
        room = LIMIT
        short = []
        for entry in entries:
            room -= len(_encode(entry))
            if room <= 0:
                break
            short.append(entry)
        dropped = {entry[0].rpartition("[")[0] for entry in entries[len(short) :]}
        self.lacking.update((row, GROWS) for row in rows if row in dropped and row not in self.lacking)
        self.kept = {entry[0]: self.kept[entry[0]] for entry in short if entry[0] in self.kept}
        return _encode(short)

    def put(self, record: bytes, *, again: bool = False, lenient: bool = False) -> set[str]:
        """Make it so; what has moved is kept from now on. Returns the paths.

        `again`: it is what `mark` has told last, and the tensors of which it tells take their places again.
        `lenient`: what there is no place for here is passed over.
        Raises `StateMismatchError` if there is no such thing here.
        """
        if not record:
            return set()
        entries = told.decode(record)
        self._walk = self._go()
        if any(path.endswith((ENTRIES, told.FRAME)) for path, *_ in entries):
            entries.sort(key=lambda entry: not entry[0].endswith(ENTRIES))  # they bring attributes with them
            for path, value, *_ in entries:
                if path.endswith(ENTRIES) and (leaf := self._leaf(path)) is not None:
                    told.take(leaf, values.decode(value))
            entries = told.make(entries, self._anew)
            self._walk = self._go()
        named = [entry for entry in entries if entry[0].endswith(STANDS)]
        if named:
            self._put_each(sorted(named, key=lambda entry: len(entry[0])), again=again, lenient=lenient)
            self._walk = self._go()
        rest = [entry for entry in entries if not entry[0].endswith(STANDS)]
        self._put_each(rest, again=again, lenient=lenient)
        self._let_go()
        return {entry[0] for entry in entries}

    def put_absent(self, paths: Iterable[str]) -> None:
        """What is there has not come with the record. Raises `UnprovedError` where nothing can stand for it."""
        self._walk = self._go()
        for path in paths:
            if not told.put_absent(path, self._leaf):
                raise absent.refusal(path)
            self.untold.paths[path] = None
            self.kept.pop(path, None)
        self._walk = self._go()
        self.untold.find(self._walk.leaves | self._walk.opened)
        self._let_go()

    def _put_each(self, entries: Iterable[tuple[str, Any, bool, bool]], *, again: bool, lenient: bool) -> None:
        for path, value, encoded, moved in entries:
            leaf = self._leaf(path)
            if leaf is None or not self._take(leaf, values.decode(value) if encoded else value, again=again):
                if lenient or path.startswith(VARIABLE) or variables.is_yet_to_be_made(path):
                    continue
                no_value = path.endswith(STANDS) or self._functions is None or again
                if no_value or not told.put_absent(path, self._leaf):
                    raise StateMismatchError(
                        absent.nowhere(path.removesuffix(STANDS), is_function=path.endswith(STANDS))
                    )
                self.untold.paths[path] = None
                continue
            if moved:
                self.kept[path] = leaf

    def _take(self, leaf: Leaf, value: Any, *, again: bool) -> bool:
        if type(value) is list and len(value) == 2 and value[0] == told.SAME:
            other = self._leaf(value[1])
            return other is not None and leaf.put(other.thing() if type(other) is NamedLeaf else other.read())
        if type(value) is list and len(value) == 1 and doers.is_told(value[0]):
            return told.take_doer(leaf, value[0], self._walk.objects)
        in_place = told.bring_back(leaf, self._marked.get(leaf.path)) if again else None
        if in_place and type(value) is list and len(value) == 2 and type(value[0]) is str and value[0] == made.RESULT:
            return True  # with its graph
        return told.take(leaf, value, in_place=in_place)

    def _anew(self, path: str) -> Leaf | None:
        self._walk = self._go()
        return self._leaf(path)

    def _leaf(self, path: str) -> Leaf | None:
        """What is there; an attribute that is yet to be made; or entries, of what was empty there and is not here."""
        leaves = self._walk.leaves
        found = leaves.get(path) or self._walk.absent.get(path) or self._walk.opened.get(path)
        found = found or told.entry(path, self._leaf)
        if found is not None:
            return found
        if path.endswith(STANDS):
            place = self._leaf(path.removesuffix(STANDS))
            return None if place is None or place.holder is None else NamedLeaf(path, place.holder, place.name, None)
        plain = leaves.get(path.removesuffix(ENTRIES))
        if plain is not None and graph.is_fillable(plain.value):
            return graph.Entries(path, plain.holder, plain.name, Filled(plain.value))
        above, _, name = path.rpartition(".")
        holder = self._walk.holders.get(above)
        return Leaf(path, holder, name, None) if holder is not None and name.isidentifier() else None
